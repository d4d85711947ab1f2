"""Qwen3-Next in torch: groups of layers with linear attention by the gated delta rule (arXiv:2412.06464), and one with gated attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from ...layers.counter_rng import DropoutKeys
from ...layers.delta_inputs import DeltaInputs
from ...layers.fused_delta import fused_gated_delta, packed_bounds
from ...layers.gated_delta import gated_delta
from ...layers.output_gates import GatedNorm
from ...layers.parameters_by_prefix import Parameters, sub_parameters
from ...layers.rank_group import Group
from ...layers.tensor_parallel import ColumnLinear, RowLinear, TensorParallel, column_linears
from ...layers.transformer.attention import Attention
from ...layers.transformer.context_parallel import ContextParallel
from ...layers.transformer.document_bounds import DocumentBounds
from ...layers.transformer.document_mask import document_starts
from ...layers.transformer.head_exchange import exchange_for_tokens, exchange_parts_for_heads
from ...layers.transformer.transformer import LayerInputs
from ...spec.run import Model, Run
from ..moe.module import MoELayer, MoETransformer

# B batch, S sequence, H hidden, K key heads, R value heads of each, D width of a key, V of a value; K as this rank has them

LAYER_OUTPUTS = 2  # of a mixture's layer besides its hidden states


class GatedDeltaNet(nn.Module):
    """Linear attention: queries, keys and values go through a short convolution and the gated delta rule; each head of what is read is
    normed and gated. Ranks that share a sequence exchange its tokens for key heads, whose states follow the sequence on one rank each."""

    def __init__(
        self,
        parameters: Parameters,
        model: Model,
        layer: int,
        kernel: Literal["flash", "math"],
        tp: TensorParallel | None,
        *,
        recompute_core: bool,
        rule: Literal["torch", "fla"] = "torch",
    ) -> None:
        super().__init__()
        self.rule = rule
        assert model.linear_key_head_dim is not None
        assert model.linear_value_head_dim is not None
        self.key_dim, self.value_dim = model.linear_key_head_dim, model.linear_value_head_dim
        self.query, self.key, self.value, self.gate, self.beta, self.decay = (
            ColumnLinear(sub_parameters(parameters, part), tp, model.lora.scale)
            for part in ("query", "key", "value", "gate", "beta", "decay")
        )
        self.beta.stays_wide = self.decay.stays_wide = True
        self.query_conv, self.key_conv, self.value_conv = (
            nn.ParameterDict({"weight": parameters[f"{part}_conv.weight"]}) for part in ("query", "key", "value")
        )
        self.a_log, self.dt_bias = parameters["a_log"], parameters["dt_bias"]  # [K R]
        self.gated_norm = GatedNorm(sub_parameters(parameters, "gated_norm"), model.norm_eps, tp)
        self.out = RowLinear(sub_parameters(parameters, "out"), tp, model.lora.scale)

    def forward(self, x: Tensor, cp: ContextParallel | None = None, starts: Tensor | None = None) -> Tensor:
        """x [B, S, H] -> [B, S, H]; under context parallelism S are this rank's tokens. `starts` are where documents start, as the rule
        reads it (LayerInputs). It has no positions, no dropout and no mask: the rule is causal."""
        query, key, value, gate, beta, decay = column_linears(x, self.query, self.key, self.value, self.gate, self.beta, self.decay)
        if cp is not None:
            heads = query.shape[-1] // self.key_dim
            parts = [torch.unflatten(each, -1, (heads, -1)) for each in (query, key, value, beta, decay)]
            exchanged = exchange_parts_for_heads(parts, cp)
            query, key, value, beta, decay = (own.flatten(2) for own in exchanged)
        inputs = DeltaInputs(
            query=query,
            key=key,
            value=value,
            beta=beta,
            decay=decay,
            query_conv=self.query_conv["weight"],
            key_conv=self.key_conv["weight"],
            value_conv=self.value_conv["weight"],
            a_log=self.a_log,
            dt_bias=self.dt_bias,
        )
        sharing = cp.group if cp else None
        if self.rule == "fla":
            read = fused_gated_delta(inputs, self.key_dim, bounds=starts, sharing=sharing)
        else:
            read = gated_delta(inputs, self.key_dim, starts=starts, sharing=sharing)
        if cp is not None:
            read = exchange_for_tokens(torch.unflatten(read, -1, (-1, self.value_dim)), cp).flatten(2)
        values, gates = (torch.unflatten(each, -1, (-1, self.value_dim)) for each in (read, gate))
        output: Tensor = self.out(self.gated_norm(values, gates).flatten(2))
        return output


class LinearLayer(MoELayer):
    """A layer whose attention is linear."""

    def attend(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        self.take_dropout_states(inputs)
        normed = x if self.norm1 is None else self.norm1(x)
        return self.add(x, self.attention(normed, inputs.cp, inputs.document_starts), self.post_norm1, self.dropout1, inputs)


class LayerGroup(nn.Sequential):  # fully_shard of torch 2.11 refuses a ModuleList
    """Layers that are repeated together: those with linear attention, and one with full attention behind them."""

    def __init__(self, parameters: Parameters, run: Run, group: int, tp: TensorParallel | None, ep: Group | None) -> None:
        many = run.model.layers_in_group
        linear = partial(GatedDeltaNet, rule=run.train.linear_attention)
        classes: list[tuple[type[MoELayer], Callable[..., nn.Module]]] = [*[(LinearLayer, linear)] * (many - 1), (MoELayer, Attention)]
        super().__init__(
            *(
                layer(sub_parameters(parameters, str(at)), run, group * many + at, tp, ep, attention)
                for at, (layer, attention) in enumerate(classes)
            )
        )

    def forward(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the hidden states [B, S, H], and what each layer returns besides."""
        others: list[Tensor | None] = []
        for layer in self:
            x, *outputs = layer(x, inputs)
            others += outputs
        return x, *others


class HybridTransformer(MoETransformer):
    """A mixture of experts whose layers are made in groups."""

    def make_layer(self, parameters: Parameters, run: Run, index: int) -> nn.Module:
        self.rule = run.train.linear_attention
        return LayerGroup(parameters, run, index, self.tp, self.ep)

    def numbered_layers(self) -> Iterator[tuple[int, nn.Module]]:
        many = self.model.layers_in_group
        for name, group in self.layers.items():
            yield from enumerate(group.children(), int(name) * many)

    def _layer_inputs(
        self, tokens: Tensor, documents: Tensor | None, bounds: DocumentBounds | None, keys: DropoutKeys | None
    ) -> LayerInputs:
        inputs = super()._layer_inputs(tokens, documents, bounds, keys)
        if documents is None or self.model.layers_in_group == 1:
            return inputs
        starts = document_starts(documents)
        return replace(inputs, document_starts=packed_bounds(starts) if self.rule == "fla" else starts.int())

    def run_layers(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        self.router_losses = []
        for name, group in self.layers.items():
            x, *outputs = self.run_layer(group, x, inputs)
            for at in range(len(outputs) // LAYER_OUTPUTS):
                self.take_outputs(f"layers.{name}.{at}", tuple(outputs[at * LAYER_OUTPUTS : (at + 1) * LAYER_OUTPUTS]))
        return x
