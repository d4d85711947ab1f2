"""What each model_type of Hugging Face states in its config.json, as rows: our keys and the file's, its restrictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .config_rope import ROPE_NAMES
from .config_rows import (
    DEEPSEEK_KEYS,
    GEMMA3_KEYS,
    GLM4_MOE_KEYS,
    GPT2_KEYS,
    GPT_OSS_KEYS,
    LLAMA_KEYS,
    MISTRAL,
    MIXTRAL_KEYS,
    OLMO2_KEYS,
    OLMO3_KEYS,
    QWEN2,
    QWEN3_KEYS,
    QWEN3_MOE_KEYS,
    QWEN3_NEXT_KEYS,
    SIZE_KEYS,
    ConfigRow,
)
from .config_windows import WindowKeys
from .dense_layers import DenseKeys
from .layer_groups import GROUP_KEYS


@dataclass(frozen=True)
class AllowedValues:
    """A key of the file that must have one of these values; a missing or null key means the first."""

    theirs: str
    values: tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class ConfigKind:
    """A model_type: its class in transformers, the keys that all its models have here, its rows and activations, its restrictions, how it
    states windows and dense layers, whether its layers are `grouped` (layer_groups.py), whether those with a window rotate by a base of
    their own, the only rope_theta that a file without such a base may have (`local_rope_problems`), the rotary embedding of a file that
    states none, the class of its authors' own code that computes the same (`auto_map` may name it), the keys of the file that its models
    here do not read, and those that are written beside its rows."""

    architecture: str
    fixed: Mapping[str, object]
    rows: tuple[ConfigRow, ...]
    acts: Mapping[str, str]
    act: str  # the file's key of the activation
    allowed: tuple[AllowedValues, ...] = ()
    window: WindowKeys | None = None
    dense: DenseKeys | None = None
    grouped: bool = False
    local_rope: bool = False
    only_base: float | None = None
    default_rope: Mapping[str, object] = field(default_factory=dict)
    own_class: str = ""
    unread: tuple[str, ...] = ()
    written: Mapping[str, object] = field(default_factory=dict)

    @property
    def known_keys(self) -> frozenset[str]:
        """The keys of the file that are read or restricted."""
        rows = (name for row in self.rows for name in row.theirs)
        positions = (*(ROPE_NAMES if is_rotary(self) else ()), *(self.window.names if self.window else ()))
        dense = (*(self.dense.names if self.dense else ()), *(GROUP_KEYS if self.grouped else ()))
        return frozenset((self.act, *rows, *positions, *dense, *(row.theirs for row in self.allowed), *self.unread))

    def has_key(self, ours: str) -> bool:
        """Whether a row states a key of our `model`."""
        return any(row.ours == ours for row in self.rows)


ROPE = {"norm": "rmsnorm", "positions": "rope", "dropout": 0.0}
OLMO2 = {"bias": False, "qk_norm": True, "qk_norm_over": "all", "norm_place": "after"}
GEMMA3 = {"bias": False, "qk_norm": True, "norm": "rmsnorm1p", "norm_place": "both", "scale_embedding": True}
GATED = {"silu": "swiglu"}

GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
GPT_OSS_ROPE |= {"original_max_position_embeddings": 4096}

V3_DEFAULTS = {"top_k": 8, "router.groups": 8, "router.top_groups": 4}

NO_DROPOUT = (AllowedValues("attention_dropout", (0,)),)  # our dropout is of the residual stream too
DEEPSEEK_ALLOWED = (
    AllowedValues("attention_bias", (False,)),
    AllowedValues("moe_layer_freq", (1,)),
)
NEXT_TOKENS = ("num_nextn_predict_layers", "num_mtp_layers")  # a head beside the model's
DEEPSEEK_UNREAD = (
    *("head_dim", "qk_head_dim"),  # follow from the others
    *NEXT_TOKENS,
    *("aux_loss_alpha", "seq_aux", "ep_size"),  # of training
)

CONFIG_KINDS: dict[str, ConfigKind] = {
    "gpt2": ConfigKind(
        architecture="GPT2LMHeadModel",
        fixed={"norm": "layernorm", "positions": "learned", "bias": True},
        rows=GPT2_KEYS,
        act="activation_function",
        acts={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu", "silu": "silu"},
        allowed=(
            AllowedValues("scale_attn_weights", (True,)),
            AllowedValues("scale_attn_by_inverse_layer_idx", (False,)),
            AllowedValues("add_cross_attention", (False,)),
        ),
    ),
    "llama": ConfigKind(
        architecture="LlamaForCausalLM",
        fixed=ROPE,
        rows=SIZE_KEYS + LLAMA_KEYS,
        act="hidden_act",
        acts=GATED,
        allowed=NO_DROPOUT,
    ),
    "mistral": ConfigKind(
        architecture="MistralForCausalLM",
        fixed=ROPE | {"bias": False},
        rows=SIZE_KEYS + MISTRAL,
        act="hidden_act",
        acts=GATED,
        allowed=NO_DROPOUT,
        window=WindowKeys(4096),
    ),
    "ministral": ConfigKind(
        architecture="MinistralForCausalLM",
        fixed=ROPE | {"bias": False},
        rows=SIZE_KEYS + MISTRAL,
        act="hidden_act",
        acts=GATED,
        allowed=NO_DROPOUT,
        window=WindowKeys(4096, by_layer=True),
    ),
    "mixtral": ConfigKind(
        architecture="MixtralForCausalLM",
        fixed=ROPE | {"bias": False},
        rows=SIZE_KEYS + MIXTRAL_KEYS,
        act="hidden_act",
        acts=GATED,
        allowed=(*NO_DROPOUT, AllowedValues("router_jitter_noise", (0,))),
        window=WindowKeys(None),
    ),
    "qwen2": ConfigKind(
        architecture="Qwen2ForCausalLM",
        fixed=ROPE | {"bias": False, "qkv_bias": True},
        rows=SIZE_KEYS + QWEN2,
        act="hidden_act",
        acts=GATED,
        allowed=NO_DROPOUT,
        window=WindowKeys(4096, by_layer=True, switched=True),
    ),
    "qwen3": ConfigKind(
        architecture="Qwen3ForCausalLM",
        fixed=ROPE | {"bias": False, "qk_norm": True},
        rows=QWEN3_KEYS,
        act="hidden_act",
        acts=GATED,
        allowed=(*NO_DROPOUT, AllowedValues("attention_bias", (False,))),
        window=WindowKeys(4096, by_layer=True, switched=True),
    ),
    "olmo2": ConfigKind(
        architecture="Olmo2ForCausalLM",
        fixed=ROPE | OLMO2,
        rows=SIZE_KEYS + OLMO2_KEYS,
        act="hidden_act",
        acts=GATED,
        allowed=(*NO_DROPOUT, AllowedValues("attention_bias", (False,))),
    ),
    "olmo3": ConfigKind(
        architecture="Olmo3ForCausalLM",
        fixed=ROPE | OLMO2,
        rows=SIZE_KEYS + OLMO3_KEYS,
        act="hidden_act",
        acts=GATED,
        allowed=(*NO_DROPOUT, AllowedValues("attention_bias", (False,))),
        window=WindowKeys(4096, by_layer=True, every=4),
        local_rope=True,
        only_base=500000.0,
    ),
    "gemma3_text": ConfigKind(
        architecture="Gemma3ForCausalLM",
        fixed=ROPE | GEMMA3,
        rows=GEMMA3_KEYS,
        act="hidden_activation",
        acts={"gelu_pytorch_tanh": "geglu_tanh"},
        allowed=(
            *NO_DROPOUT,
            AllowedValues("attention_bias", (False,)),
            AllowedValues("use_bidirectional_attention", (False,)),
            AllowedValues("attn_logit_softcapping", (None,)),
            AllowedValues("final_logit_softcapping", (None,)),
        ),
        window=WindowKeys(4096, by_layer=True, every=6, every_key="sliding_window_pattern"),
        local_rope=True,
    ),
    "qwen3_moe": ConfigKind(
        architecture="Qwen3MoeForCausalLM",
        fixed=ROPE | {"bias": False, "qk_norm": True},
        rows=tuple(row for row in SIZE_KEYS if row.ours != "ffn") + QWEN3_MOE_KEYS,
        act="hidden_act",
        acts=GATED,
        allowed=(
            *NO_DROPOUT,
            AllowedValues("attention_bias", (False,)),
            AllowedValues("decoder_sparse_step", (1,)),
        ),
        window=WindowKeys(4096, switched=True),
        dense=DenseKeys("mlp_only_layers", "intermediate_size", default_ffn=6144),
    ),
    "qwen3_next": ConfigKind(
        architecture="Qwen3NextForCausalLM",
        fixed=ROPE | {"bias": False, "qk_norm": True, "norm": "rmsnorm1p"},
        rows=QWEN3_NEXT_KEYS,
        act="hidden_act",
        acts=GATED,
        allowed=(
            *NO_DROPOUT,
            AllowedValues("attention_bias", (False,)),
            AllowedValues("decoder_sparse_step", (1,)),
            AllowedValues("mlp_only_layers", ([],)),
        ),
        grouped=True,
        unread=("intermediate_size",),  # of layers without experts
    ),
    "glm4_moe": ConfigKind(
        architecture="Glm4MoeForCausalLM",
        fixed=ROPE | {"bias": False, "router.score": "sigmoid", "router.bias": True},
        rows=SIZE_KEYS + GLM4_MOE_KEYS,
        act="hidden_act",
        acts=GATED,
        allowed=NO_DROPOUT,
        unread=NEXT_TOKENS,
        written={"num_nextn_predict_layers": 0},
    ),
    "gpt_oss": ConfigKind(
        architecture="GptOssForCausalLM",
        fixed=ROPE | {"expert_bias": True, "sinks": True},
        rows=GPT_OSS_KEYS,
        act="hidden_act",
        acts={"silu": "swiglu_clamped"},
        allowed=(*NO_DROPOUT, AllowedValues("swiglu_alpha", (1.702,)), AllowedValues("swiglu_limit", (7.0,))),
        window=WindowKeys(128, by_layer=True, every=2),
        default_rope=GPT_OSS_ROPE,
        unread=("initial_context_length", "experts_per_token"),  # of OpenAI's own code
    ),
    "deepseek_v2": ConfigKind(
        architecture="DeepseekV2ForCausalLM",
        fixed=ROPE | {"bias": False, "router.score": "softmax", "router.normalize": False},
        rows=(*DEEPSEEK_KEYS, ConfigRow("dense_layers", ("first_k_dense_replace",), int, 0)),
        act="hidden_act",
        acts=GATED,
        allowed=(
            *NO_DROPOUT,
            *DEEPSEEK_ALLOWED,
            AllowedValues("mlp_bias", (False,)),
            AllowedValues("scoring_func", ("softmax",)),
            AllowedValues("topk_method", ("greedy", "group_limited_greedy")),
            AllowedValues("norm_topk_prob", (False,)),  # transformers never divides, DeepSeek's code would
        ),
        own_class="modeling_deepseek.DeepseekV2ForCausalLM",
        unread=DEEPSEEK_UNREAD,
        written={"topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ConfigKind(
        architecture="DeepseekV3ForCausalLM",
        fixed=ROPE | {"bias": False, "router.score": "sigmoid", "router.bias": True},
        rows=(
            *(replace(row, default=V3_DEFAULTS.get(row.ours, row.default)) for row in DEEPSEEK_KEYS),
            ConfigRow("dense_layers", ("first_k_dense_replace",), int, 3),
            ConfigRow("router.normalize", ("norm_topk_prob",), bool, True),
        ),
        act="hidden_act",
        acts=GATED,
        allowed=(
            *NO_DROPOUT,
            *DEEPSEEK_ALLOWED,
            AllowedValues("rope_interleave", (True,)),
            AllowedValues("scoring_func", ("sigmoid",)),
            AllowedValues("topk_method", ("noaux_tc",)),
        ),
        own_class="modeling_deepseek.DeepseekV3ForCausalLM",
        unread=DEEPSEEK_UNREAD,
        written={"num_nextn_predict_layers": 0},
    ),
}  # keyed by model_type
SAME_MODELS = {"kimi_k2": "deepseek_v3"}  # model_types of another's models, which are read and written as those (arXiv:2507.20534)


def is_rotary(kind: ConfigKind) -> bool:
    """Whether all models of a model_type have rotary embeddings."""
    return kind.fixed["positions"] == "rope"
