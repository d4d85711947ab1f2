"""The section `model` of a run: the shape of a model, and what its layers are."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Literal

from msgspec import Meta

from ..numbers.bounded import Below1, Count, LayerCount, Natural, NotNegative, Positive, PositiveShare
from .initial_weights import InitialWeights
from .lora import LINEAR_LAYERS, Lora, layers_of_target
from .mtp import Mtp
from .rope import Rope
from .router import Router

LayerType = Literal["full_attention", "sliding_attention"]  # transformers' words
LayerTypes = Annotated[tuple[LayerType, ...], Meta(extra={"repeats": True})]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model's shape; every size is a count of elements along a logical dim."""

    family: str
    layers: LayerCount
    hidden: Count
    heads: Count
    vocab: Count
    kv_heads: Count | None = None
    head_dim: Count | None = None
    q_lora_rank: Natural | None = None
    kv_lora_rank: Count | None = None
    qk_nope_head_dim: Count | None = None
    qk_rope_head_dim: Count | None = None
    v_head_dim: Count | None = None
    full_attention_interval: Count | None = None
    linear_num_key_heads: Count | None = None
    linear_num_value_heads: Count | None = None
    linear_key_head_dim: Count | None = None
    linear_value_head_dim: Count | None = None
    linear_conv_kernel_dim: Count | None = None
    ffn: Count | None = None
    context: Count | None = None
    vocab_multiple: Count = 1
    tied: bool = False
    bias: bool = False
    qkv_bias: bool | None = None
    expert_bias: bool = False
    sinks: bool = False
    qk_norm: bool = False
    qk_norm_over: Literal["head", "all"] = "head"
    norm: Literal["layernorm", "rmsnorm", "rmsnorm1p"] = "layernorm"
    norm_place: Literal["before", "after", "both"] = "before"
    norm_eps: Positive = 1e-5
    act: Literal["gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu", "geglu_tanh", "swiglu_clamped"] = "gelu"
    scale_embedding: bool = False
    query_pre_attn_scalar: Count | None = None
    positions: Literal["learned", "rope", "none"] = "learned"
    rope_base: Positive = 10000.0
    rope_local_base: Positive | None = None
    rope_share: PositiveShare = 1.0
    rope: Rope = field(default_factory=Rope)
    window: Count | None = None
    layer_types: LayerTypes | None = None
    init: InitialWeights = field(default_factory=InitialWeights)
    lora: Lora = field(default_factory=Lora)
    mtp: Mtp = field(default_factory=Mtp)
    dropout: Below1 = 0.0
    experts: Natural = 0
    top_k: Natural = 0
    router: Router = field(default_factory=Router)
    expert_ffn: Count | None = None
    shared_experts: Natural = 0
    dense_layers: Natural = 0
    aux_loss: NotNegative = 0.0
    capacity: Positive | None = None
    hf: str | None = None
    parameters: dict[str, tuple[Natural, ...]] | None = None
    weights: str | None = None

    @property
    def adds_router_loss(self) -> bool:
        """Whether a loss of a mixture's routers adds to the gradient."""
        return self.experts > 0 and (self.aux_loss > 0 or self.router.z_loss > 0)

    def is_trained(self, parameter: str) -> bool:
        """Whether a parameter, by its logical name, is trained: with LoRA only its A and B are."""
        return not self.lora.rank or Lora.owns(parameter)

    @property
    def linear_layers(self) -> frozenset[str]:
        """The words by which `layer_word` names the linear layers in a layer or group of the model, but the router's."""
        words = {"query", "key", "value", "out", "up", "down"} | ({"gate"} if self.has_gate or self.experts else set())
        if self.family == "mla":
            words |= {"key_down", "rope_key"} | ({"query_down"} if self.q_lora_rank else set())
        if self.family == "hybrid":
            words |= {"query_gate", "shared_gate"} | (LINEAR_LAYERS if self.layers_in_group > 1 else set())
        return frozenset(words)

    def layer_word(self, weight: str) -> str:
        """Return the word that names the linear layer of a weight, by its name in a layer or the model, of a hybrid in a group or the
        model: the last one before `.weight`. Of a hybrid's attention it says which of both attentions the layer has, and that a gate is
        attention's."""
        *before, half, word = ("", *weight.removesuffix(".weight").split("."))
        if self.family != "hybrid" or half != "attention":
            return word
        if int(before[-1]) + 1 < self.layers_in_group:
            return f"linear_{word}"
        return "query_gate" if word == "gate" else word

    @property
    def lora_layers(self) -> frozenset[str]:
        """Those of the linear layers to which LoRA adds a product."""
        if self.lora.targets is None:
            return self.linear_layers
        words = {word for target in self.lora.targets for word in layers_of_target(target, self.family)}
        return self.linear_layers & words

    @property
    def shares_embedding(self) -> bool:
        """Whether the last part of the model uses the embedding too: as its head, or for the modules that predict further tokens."""
        return self.tied or self.mtp.layers > 0

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that rotary positions turn: its first rope_share, with latent attention its last qk_rope_head_dim."""
        if self.family == "mla":
            return self.qk_rope_head_dim or self.hidden // self.heads
        return int((self.head_dim or self.hidden // self.heads) * self.rope_share)

    @property
    def has_gate(self) -> bool:
        """Whether the feed-forward multiplies by an activated gate."""
        return self.act in ("swiglu", "geglu", "geglu_tanh", "swiglu_clamped")

    @property
    def score_scalar(self) -> int:
        """The number by whose root attention's scores are divided; latent attention's follows from its own keys."""
        return self.query_pre_attn_scalar or self.head_dim or self.hidden // self.heads

    @property
    def has_local_rope(self) -> bool:
        """Whether layers with the window rotate otherwise than the others: by another base, or without their scaling."""
        is_other = self.rope_local_base not in (None, self.rope_base) or self.rope.type != "default"
        return self.positions == "rope" and self.rope_local_base is not None and is_other and self.windowed_layers > 0

    def is_windowed(self, layer: int) -> bool:
        """Whether a layer has the window: all layers, or those that layer_types names, which repeats until the last layer."""
        return self.window is not None and (not self.layer_types or self.layer_types[layer % len(self.layer_types)] == "sliding_attention")

    def effective_window(self, seq: int) -> int | None:
        """The window, where some layers have it and it is shorter than sequences of `seq` tokens; None where it hides nothing."""
        return self.window if self.window and self.window < seq and self.windowed_layers else None

    @property
    def types_of_layers(self) -> tuple[LayerType, ...] | None:
        """The type of each layer; None where all have the window, or none."""
        types, has_some = self.layer_types, 0 < self.windowed_layers < self.layers
        return tuple(types[each % len(types)] for each in range(self.layers)) if types and has_some else None

    @property
    def layers_in_group(self) -> int:
        """The layers that are repeated together: one, or of a hybrid the linear layers and the one with full attention behind them."""
        return self.full_attention_interval or 1 if self.family == "hybrid" else 1

    @property
    def layer_groups(self) -> int:
        """The number of groups of layers, each of which is one layer of the op table, of plans and of pipelines; at least 1."""
        return max(1, self.layers // self.layers_in_group)

    @property
    def repeated_layers(self) -> int:
        """The number of groups of layers that are alike: all but the first dense ones; at least 1, which a rule asks for."""
        return max(1, self.layer_groups - self.dense_layers)

    @property
    def most_ep_load(self) -> float:
        """The most copies of tokens that a rank of experts can compute, over an even share: each token sends one to each of the rank's
        experts, or each expert takes its capacity."""
        return min(self.experts / self.top_k, max(1.0, self.capacity or inf))

    @property
    def mixture_layers(self) -> int:
        """The number of layers with routed experts, of a family that has them: all but the dense ones, and those of modules that predict
        further tokens."""
        return (self.layer_groups - self.dense_layers) * self.layers_in_group + self.mtp.layers

    @property
    def windowed_layers(self) -> int:
        """The number of layers that have the window."""
        if self.window is None:
            return 0
        if not self.layer_types:
            return self.layers
        rounds, rest = divmod(self.layers, len(self.layer_types))
        return rounds * self.layer_types.count("sliding_attention") + self.layer_types[:rest].count("sliding_attention")
