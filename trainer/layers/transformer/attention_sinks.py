"""Attention sinks: softmax over the scores and one learned logit for each head, which has no value (arXiv:2508.10925 section 2.2).

With the log-sum-exp L of a row's scores and the sink c, L' = log(exp(L) + exp(c)) is that of all of them. Values are those without a sink
times exp(L - L'); backward is that of the fused kernel, given these values and L'. The gradient of c is the sum over rows of
-exp(c - L') times the product of the values and their gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...spec.derived.document_kernel import MOST_HEAD_DIM
from ..compiled_outputs import as_output
from ..dtypes import at_least_float32
from . import core_attention
from .core_attention import KeyBlock, attention_scores
from .windowed_core import gpu_window_gradients, gpu_window_values

# B batch, S sequence, A heads, N key and value heads, D head_dim, W window


class HeadSinks(NamedTuple):
    """The sinks of the heads that attend on this rank: `heads` from number `first` of a parameter. Of ranks that exchange tokens for heads
    each has some of them. Autograd saves the parameter, never a view of it: ZeRO-3 frees the parameter's memory before backward."""

    parameter: Tensor
    first: int
    heads: int


def has_fused_sinks(query: Tensor, mask: Tensor | None) -> bool:
    """Return whether a fused kernel that returns its log-sum-exp computes attention for a query [B, A, S, D]: the one for CPUs, and
    FlashAttention-2, which takes half precision and no mask."""
    if not query.is_cuda:
        return True
    is_half = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= MOST_HEAD_DIM
    return mask is None and is_half and core_attention.has_flash_attention()


def sink_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: HeadSinks,
    mask: Tensor | None,
    band: Tensor | None,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """Return the values [B, S, A, D] of query [B, A, S, D], key and value [B, N, S, D] with sinks, by a fused kernel.

    Each query sees the last `window` keys; `band` [W, 2W] is then `window_band`, which FlashAttention-2 does not need. `mask` [B, 1, S, S]
    hides further keys.
    """
    window = window if window is not None and window < query.shape[2] else None
    given = query, key, value, sinks.parameter, sinks.first, mask, band, window, scale
    values: Tensor = _SinkAttention.apply(*given)  # type: ignore[no-untyped-call]
    return values


class _SinkAttention(torch.autograd.Function):
    """Saves the values, which are also the output product's input, and one float32 per query and head."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        first: int,
        mask: Tensor | None,
        band: Tensor | None,
        window: int | None,
        scale: float | None,
    ) -> Tensor:
        band = None if window is None or query.is_cuda else band
        if query.is_cuda:
            values, log_sums = gpu_window_values(query, key, value, window, scale)
        else:
            values, log_sums = _cpu_values(query, key, value, mask, band, scale)
        wide = _wide_sinks(sinks, first, query.shape[1])
        values.mul_(torch.sigmoid(log_sums - wide).mT.unsqueeze(-1))
        log_sums = torch.logaddexp(log_sums, wide)
        ctx.save_for_backward(query, key, value, sinks, mask, band, values, log_sums)
        ctx.first, ctx.window, ctx.scale = first, window, scale
        return as_output(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, mask, band, values, log_sums = ctx.saved_tensors
        products = (grad * values).sum(-1, dtype=log_sums.dtype)  # [B, S, A]
        shares = torch.exp(_wide_sinks(sinks, ctx.first, query.shape[1]) - log_sums).mT  # of the sinks, [B, S, A]
        sinks_grad = _gradient_of_all(-(shares * products).sum((0, 1)), ctx.first, sinks)
        inputs = grad, query, key, value, values, log_sums
        if query.is_cuda:
            return *gpu_window_gradients(*inputs, ctx.window, ctx.scale), sinks_grad, None, None, None, None, None
        return *_cpu_gradients(*inputs, mask, band, ctx.scale), sinks_grad, None, None, None, None, None


def _wide_sinks(sinks: Tensor, first: int, heads: int) -> Tensor:
    """Return the sinks of the heads from number `first`, in at least float32: [A, 1]."""
    return at_least_float32(sinks[first : first + heads])[:, None]


def _gradient_of_all(grad: Tensor, first: int, sinks: Tensor) -> Tensor:
    """Return the gradient [A] of the sinks of the heads from number `first` as that of all `sinks`."""
    whole = torch.zeros_like(sinks)
    whole[first : first + len(grad)] = grad
    return whole


def _cpu_values(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, band: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return (values [B, S, A, D] without sinks, log-sum-exps [B, A, S]), block by block of the window."""
    B, A, S, _ = query.shape
    values, parts = query.new_empty(B, S, A, value.shape[-1]), []
    for rows, keys, causal, seen in _blocks(S, mask, band):
        block, log_sum = core_attention.flash_block(query[:, :, rows], key[:, :, keys], value[:, :, keys], causal, seen, scale)
        values[:, rows] = block.transpose(1, 2)
        parts.append(log_sum)
    return values, torch.cat(parts, dim=2)


def _cpu_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    values: Tensor,
    log_sums: Tensor,
    mask: Tensor | None,
    band: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value."""
    blocks = _blocks(query.shape[2], mask, band)
    return core_attention.sum_block_gradients(grad, (query, key, value), (values, log_sums), blocks, scale)


def _blocks(size: int, mask: Tensor | None, band: Tensor | None) -> Iterator[KeyBlock]:
    """Yield the blocks of a window's width of queries, which see two blocks of keys; without a window all are one block."""
    window = size if band is None else band.shape[0]
    for begin in range(0, size, window):
        end, first = min(begin + window, size), max(0, begin - window)
        seen = None if band is None or (not begin and mask is None) else band[: end - begin, first - begin + window : end - begin + window]
        if mask is not None:
            hidden = mask[:, :, begin:end, first:end]
            seen = hidden if seen is None else hidden + seen
        yield KeyBlock(slice(begin, end), slice(first, end), seen is None, seen)


def sink_weights(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None, sinks: HeadSinks) -> Tensor:
    """Return the shares [B, A, S, S] of keys in softmax(scale q k^T + mask, and sinks); no mask: causal."""
    scores = attention_scores(query, key, mask, scale)
    weights: Tensor = _SinkSoftmax.apply(scores, sinks.parameter, sinks.first)  # type: ignore[no-untyped-call]
    return weights


class _SinkSoftmax(torch.autograd.Function):
    """Saves its result, and the parameter. The gradients of a row's scores and of the sink add up to zero, as those of any softmax."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, sinks: Tensor, first: int) -> Tensor:
        weights = torch.softmax(scores, dim=-1)
        # The largest share is exp(the largest score - the log-sum-exp).
        log_sums = at_least_float32(scores.amax(-1)) - at_least_float32(weights.amax(-1)).log()  # [B, A, S]
        weights.mul_(torch.sigmoid(log_sums - _wide_sinks(sinks, first, scores.shape[1])).unsqueeze(-1))
        ctx.save_for_backward(weights, sinks)
        ctx.first = first
        return as_output(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, sinks = ctx.saved_tensors
        scores_grad = torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)
        wide = torch.promote_types(weights.dtype, torch.float32)
        return scores_grad, _gradient_of_all(-scores_grad.sum((0, 2, 3), dtype=wide), ctx.first, sinks), None
