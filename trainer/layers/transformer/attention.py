"""Causal self-attention."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...spec.run import Model
from ..dropout import Dropout
from ..joined_products import JoinedWeights
from ..norms import AllHeadsNorm, HeadNorm, norm_all_heads
from ..output_gates import gated_product
from ..parameters_by_prefix import Parameters, sub_parameters
from ..recompute import recompute
from ..tensor_parallel import ColumnLinear, RowLinear, TensorParallel, column_linears
from .attention_sinks import HeadSinks, has_fused_sinks, sink_attention, sink_weights
from .context_parallel import AttentionCore, ContextParallel, context_attention
from .core_attention import (
    FlashCore,
    FusedCore,
    ScoresCore,
    attention_weights,
    flash_attention,
    is_for_flash,
    weighted_values,
    window_mask,
    windowed_attention,
)
from .document_attention import DocumentCore, document_attention
from .document_bounds import DocumentBounds
from .head_exchange import exchange_for_heads, exchange_for_tokens
from .rotary import rotate
from .windowed_core import WindowedCore

# B batch, S sequence, H hidden, A heads, N key and value heads, D head_dim; A and N as this rank has them


class Attention(JoinedWeights):
    """Causal attention; each key and value head serves a group of query heads (arXiv:2305.13245).

    A rank's number of heads is read from the width of its own matrices. Attention dropout takes the path without a fused kernel,
    because a fused kernel's dropout can't be keyed. `recompute_core`: backward computes the scores again (selective recomputation).
    """

    def __init__(
        self,
        parameters: Parameters,
        model: Model,
        layer: int,
        kernel: Literal["flash", "math"],
        tp: TensorParallel | None,
        *,
        recompute_core: bool,
    ) -> None:
        super().__init__()
        scalar = model.query_pre_attn_scalar
        self.scale: float | None = None if scalar is None else scalar**-0.5  # of scores; None: 1 / sqrt(D)
        self.first_head, self.padded_heads = (tp.first_head, tp.padded_heads) if tp else (0, 0)
        self.make_projections(parameters, model, tp)
        self.out = RowLinear(sub_parameters(parameters, "out"), tp, model.lora.scale)
        self.dropout = Dropout(model.dropout, layer, "attention")
        self.kernel, self.recompute_core = kernel, recompute_core
        self.window = model.window if model.is_windowed(layer) else None
        self.sinks = parameters["sinks"] if model.sinks else None  # [A]

    def make_projections(self, parameters: Parameters, model: Model, tp: TensorParallel | None) -> None:
        """Make the layers of `heads`; a family overrides both to have other queries, keys and values."""
        self.head_dim = model.head_dim or model.hidden // model.heads
        parts = ("query", "key", "value")
        self.query, self.key, self.value = (ColumnLinear(sub_parameters(parameters, part), tp, model.lora.scale) for part in parts)
        self.gate = ColumnLinear(sub_parameters(parameters, "gate"), tp, model.lora.scale) if "gate.weight" in parameters else None
        self.tp = tp
        self.query_norm, self.key_norm = (
            self.make_head_norm(sub_parameters(parameters, f"{part}_norm"), model, part) if model.qk_norm else None
            for part in ("query", "key")
        )

    def column_layers(self) -> tuple[ColumnLinear, ...]:
        """Return the layers that share the input, in their order; none where a family has others."""
        return (self.query, self.key, self.value) if self.gate is None else ()

    def make_head_norm(self, parameters: Parameters, model: Model, part: str) -> HeadNorm | AllHeadsNorm:
        """Make the norm of each query or key, or of those of all heads together."""
        if model.qk_norm_over == "head":
            return HeadNorm(parameters, model, self.tp)
        heads = model.heads if part == "query" else model.kv_heads or model.heads
        return AllHeadsNorm(parameters, model.norm_eps, heads * self.head_dim)

    def heads(self, x: Tensor, angles: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the query, key and value of each head, [B, S, A or N, D], for x [B, S, H], and the gate [B, S, A D] of what attention
        returns, where it has one."""
        gates = () if self.gate is None else (self.gate,)
        query, key, value, *gated = column_linears(x, self.query, self.key, self.value, *gates, joined=self.joined_for(x))
        if isinstance(self.query_norm, AllHeadsNorm) and isinstance(self.key_norm, AllHeadsNorm):
            if self.tp is not None:
                query, key = norm_all_heads(query, key, self.query_norm, self.key_norm, self.tp)
            else:
                query, key = self.query_norm(query), self.key_norm(key)
        query, key, value = (torch.unflatten(each, -1, (-1, self.head_dim)) for each in (query, key, value))
        if isinstance(self.query_norm, HeadNorm) and isinstance(self.key_norm, HeadNorm):
            query, key = self.query_norm(query), self.key_norm(key)
        if angles is not None:
            query, key = rotate(query, angles), rotate(key, angles)
        return query, key, value, next(iter(gated), None)

    def forward(
        self,
        x: Tensor,
        angles: Tensor | None,
        mask: Tensor | None,
        states: Tensor | None,
        cp: ContextParallel | None = None,
        band: Tensor | None = None,
        bounds: DocumentBounds | None = None,
    ) -> Tensor:
        """x [B, S, H] -> [B, S, H]; under context parallelism S are this rank's tokens, and `mask` and `states` are those of its queries.

        `band` is the mask of a block of the model's window, where that does not cover S and the fused kernel computes in blocks.
        `bounds` are those of documents, where the kernel takes them in place of a mask.
        """
        band = band if self.window else None
        query, key, value, gate = self.heads(x, angles)
        if cp is not None and not cp.exchanges_heads:
            values = self.core_across_ranks(query, key, value, mask, states, cp, bounds)  # [B, S, A, D]
        else:
            first_head = self.first_head
            if cp is not None:
                query, key, value = exchange_for_heads(query, key, value, cp)
                first_head += cp.group.rank * query.shape[2]
            if self.recompute_core:
                values = recompute(self.core, query, key, value, mask, states, band, first_head, bounds)
            else:
                values = self.core(query, key, value, mask, states, band, first_head, bounds)
            if cp is not None:
                values = exchange_for_tokens(values, cp)
        if self.padded_heads:  # a padded head sees the key heads that it shares with its neighbours, and nothing may be learnt from it
            values = F.pad(values[:, :, : -self.padded_heads], (0, 0, 0, self.padded_heads))
        result = values.flatten(2)
        output: Tensor = self.out(result if gate is None else gated_product(result, gate))  # [B, S, H]
        return output

    def core(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        states: Tensor | None,
        band: Tensor | None,
        first_head: int,
        bounds: DocumentBounds | None,
    ) -> Tensor:
        """Return the values weighted by the softmax of the scores, [B, S, A, D]; `first_head`: the number of the first in the layer."""
        if bounds is not None:
            return document_attention(query, key, value, bounds, self.window, self.scale)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # [B, A or N, S, D]
        sinks = None if self.sinks is None else HeadSinks(self.sinks, first_head - self.first_head, query.shape[1])
        if self.kernel == "flash" and not self.dropout.is_active(states):
            if sinks is not None and has_fused_sinks(query, mask):
                return sink_attention(query, key, value, sinks, mask, band, self.window, self.scale)
            if sinks is None and band is not None:
                return windowed_attention(query, key, value, mask, band, self.scale).transpose(1, 2)
            if sinks is None:
                return flash_attention(query, key, value, mask, self.scale).transpose(1, 2)
        if self.window and self.window < query.shape[2]:
            windowed = window_mask(query.shape[2], self.window, query.dtype, query.device)
            mask = windowed if mask is None else mask + windowed
        scored = query, key, mask, self.scale
        weights = attention_weights(*scored) if sinks is None else sink_weights(*scored, sinks)  # [B, A, S, S]
        return weighted_values(self.dropout(weights, states, _head_numbers(query, first_head)), value).transpose(1, 2)

    def core_across_ranks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        states: Tensor | None,
        cp: ContextParallel,
        bounds: DocumentBounds | None,
    ) -> Tensor:
        """As `core`, where ranks share the sequence; the core's own backward does the selective recomputation."""
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        core: AttentionCore
        window = self.window if self.window and self.window < query.shape[2] * cp.group.size else None
        is_fused = self.kernel == "flash" and not self.dropout.is_active(states)
        if bounds is not None:
            core = DocumentCore(cp, bounds, self.window, self.scale)
        elif is_fused and window is None:
            core = FlashCore(cp, self.scale) if is_for_flash(query, value, mask) else FusedCore(cp, self.scale)
        elif is_fused and window is not None and mask is None and is_for_flash(query, value, mask):
            core = WindowedCore(cp, window, self.scale)
        else:
            draw_mask = (
                None if states is None or not self.dropout.p else partial(self.dropout.mask, states, _head_numbers(query, self.first_head))
            )
            core = ScoresCore(cp, self.dropout.p, draw_mask, window, self.scale)
        attend = context_attention
        if query.is_cuda and torch.compiler.is_compiling() and not isinstance(core, ScoresCore):
            from .uncompiled_attention import uncompiled_context_attention as attend
        return attend(query, key, value, mask, core, cp, recompute=self.recompute_core)


def _head_numbers(query: Tensor, first: int) -> range:
    """Return the numbers, in the whole layer, of the heads of a query [B, A, S, D], the first of which is `first`."""
    return range(first, first + query.shape[1])
