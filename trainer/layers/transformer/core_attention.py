"""The core of attention: values weighted by the softmax of scores, on one rank that has the whole sequence or on ranks that share it.

On ranks that share it (context_parallel.py) a core has a forward and a backward of its own: both are given the keys and values of the
whole sequence, and neither saves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right

from ...spec.derived.document_kernel import MOST_HEAD_DIM
from .context_parallel import ContextParallel, Tensors

# B batch, S sequence, s this rank's part of it, A heads, N key and value heads, G = A / N, D head_dim, L tokens of a block;
# a value may have another D than queries and keys. A scale of scores that is None is 1 / sqrt(D)

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_GPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention
_GPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
HEAD_ALIGNED = 8  # elements, of which a head of FlashAttention-2 on a GPU has a multiple


def flash_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Return attention's values [B, A, S, D], by torch's fused kernels (arXiv:2307.08691)."""
    if query.shape[-1] != value.shape[-1] and not query.is_cuda:
        values: Tensor = _UnequalFlash.apply(query, key, value, mask, scale)  # type: ignore[no-untyped-call]
        return values
    grouped = key.shape[1] != query.shape[1]
    if grouped and query.is_cuda and (mask is not None or query.dtype == torch.float32):
        # The only fused CUDA kernel that takes a mask, or float32, does not support grouped heads.
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
        grouped = False
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)


class _UnequalFlash(torch.autograd.Function):
    """The kernel for CPUs, which takes heads of one size, for values of another size than queries and keys: the smaller are padded while
    it runs, and saved without padding. For such heads torch itself would take its kernels apart, and save the scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        values, log_sums = flash_block(query, key, value, mask is None, mask, scale)
        values = values.transpose(1, 2).contiguous().transpose(1, 2)  # without padding, and as the output product reads it
        ctx.save_for_backward(query, key, value, mask, values, log_sums)
        ctx.scale = scale
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, values, log_sums = ctx.saved_tensors
        return *flash_block_gradients(grad, query, key, value, values, log_sums, mask is None, mask, ctx.scale), None, None


def has_flash_attention() -> bool:
    """Return whether this process's GPU runs FlashAttention-2: from compute capability 8 on."""
    return torch.cuda.get_device_capability() >= (8, 0)


def is_for_flash(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether ranks that share the sequence call the fused kernel block by block, by its log-sum-exp: the one for CPUs, and
    FlashAttention-2, which takes half precision and no mask."""
    if not query.is_cuda:
        return True
    is_half = query.dtype in (torch.bfloat16, torch.float16) and max(query.shape[-1], value.shape[-1]) <= MOST_HEAD_DIM
    return mask is None and is_half and has_flash_attention()


def flash_block(query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return (values [B, A, S, D], the log-sum-exp of each row of scores [B, A, S]) of the fused kernel; on a GPU without a mask."""
    padded, scale = padded_heads(query, key, value), score_scale(query, scale)
    if query.is_cuda:
        values, log_sums = _GPU_FLASH(*padded, 0.0, causal, scale=scale)[:2]
    else:
        values, log_sums = _FLASH(*padded, 0.0, causal, attn_mask=mask, scale=scale)
    return values[..., : value.shape[-1]], log_sums


def flash_block_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    values: Tensor,
    log_sums: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> Tensors:
    """Return the gradients of query, key and value from that of the values, by the fused kernel; `values` and `log_sums` may be those of
    more keys than these."""
    padded, scale = padded_heads(grad, query, key, value, values), score_scale(query, scale)
    if query.is_cuda:
        undrawn = query.new_empty(0, dtype=torch.int64)  # the state of dropout, which is not read
        sizes = None, None, query.shape[2], key.shape[2]  # no sequences apart
        grads = _GPU_FLASH_BACKWARD(*padded, log_sums.contiguous(), *sizes, 0.0, causal, undrawn, undrawn, scale=scale)
    else:
        grads = _FLASH_BACKWARD(*padded, log_sums, 0.0, causal, attn_mask=mask, scale=scale)
    return tuple(each[..., : of.shape[-1]] for each, of in zip(grads, (query, key, value), strict=True))


def score_scale(query: Tensor, scale: float | None) -> float:
    """Return the scale of scores, by default 1 / sqrt(D) of a query [..., D]."""
    return query.shape[-1] ** -0.5 if scale is None else scale


def padded_heads(*tensors: Tensor) -> Tensors:
    """Return tensors [..., D] of one D, the largest of them or what a GPU takes, padded with zeros."""
    size = max(each.shape[-1] for each in tensors)
    if tensors[0].is_cuda:
        size = -(-size // HEAD_ALIGNED) * HEAD_ALIGNED
    return tuple(each if each.shape[-1] == size else F.pad(each, (0, size - each.shape[-1])) for each in tensors)


def windowed_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, band: Tensor, scale: float | None = None) -> Tensor:
    """As `flash_attention`, where each query sees the last W keys, itself included: in blocks of W queries, which see two blocks of keys.

    `band` [W, 2W] is `window_band`; `mask` [B, 1, S, S] hides further keys.
    """
    window, size = band.shape[0], query.shape[2]
    values = []
    for begin in range(0, size, window):
        end, first = min(begin + window, size), max(0, begin - window)
        seen = band[: end - begin, first - begin + window : end - begin + window]
        if mask is not None:
            seen = mask[:, :, begin:end, first:end] + seen
        parts = query[:, :, begin:end], key[:, :, first:end], value[:, :, first:end]
        values.append(flash_attention(*parts, seen if begin or mask is not None else None, scale))
    return torch.cat(values, dim=2)


def window_band(window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask of 0 and -inf [W, 2W] of a block of W queries on the keys of the block before and of its own."""
    queries, keys = torch.arange(window, device=device)[:, None], torch.arange(2 * window, device=device)
    is_seen = (queries < keys) & (keys <= queries + window)
    return torch.zeros(is_seen.shape, dtype=dtype, device=device).masked_fill_(~is_seen, -torch.inf)


def window_mask(size: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask of 0 and -inf [S, S] under which each of S positions sees the last `window`, itself included."""
    hidden = torch.full((size, size), -torch.inf, dtype=dtype, device=device)
    return hidden.triu(1) + hidden.tril(-window)


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Return softmax(scale q k^T + mask) [B, A, S, S]; no mask: causal."""
    # The scores have no name, so that they are freed before softmax makes its result.
    return torch.softmax(attention_scores(query, key, mask, scale), dim=-1)


def attention_scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Return scale q k^T + mask [B, A, S, S]; no mask: causal. The queries of a group are rows of one product."""
    B, A, S, _ = query.shape
    if mask is None:
        mask = torch.full((S, S), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
    return torch.add(mask, (group_rows(query, key) @ key.mT).view(B, A, S, -1), alpha=score_scale(query, scale))


def weighted_values(weights: Tensor, value: Tensor) -> Tensor:
    """Return the values [B, A, S, D] weighted by weights [B, A, S, S]."""
    B, A, S, _ = weights.shape
    return (group_rows(weights, value) @ value).view(B, A, S, -1)


def group_rows(x: Tensor, key: Tensor) -> Tensor:
    """Return the rows of x [B, A, S, ...] grouped by the key head of key [B, N, ...] that serves them: [B, N, G S, ...]."""
    return x.reshape(x.shape[0], key.shape[1], -1, x.shape[-1])


class KeyBlock(NamedTuple):
    """Keys that some of this rank's queries see: all of them, those up to the query's own (`causal`), or as a mask says."""

    rows: slice
    keys: slice
    causal: bool
    mask: Tensor | None


class FlashCore:
    """torch's fused kernel for CPUs, or FlashAttention-2, block by block; the log-sum-exp of each block gives its share of the whole.

    Saves the values and one float32 per query and head. Each of this rank's two chunks attends to the keys before it as one block
    and to its own keys as another, so that keys which no query sees cost nothing. With a mask, all keys are one block.
    """

    saves = True

    def __init__(self, cp: ContextParallel, scale: float | None = None) -> None:
        self.cp, self.scale = cp, scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensors]:
        """See `AttentionCore`."""
        B, A, s, _ = query.shape
        values = query.new_empty(B, s, A, value.shape[-1])
        log_sums = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))  # [B, A, s]
        begun = -1  # the first row of the chunk whose blocks are being added up
        for rows, keys, causal, block_mask in self._blocks(key.shape[2], mask):
            block, log_sum = flash_block(query[:, :, rows], key[:, :, keys], value[:, :, keys], causal, block_mask, self.scale)
            if rows.start == begun:
                add_block(values[:, rows].transpose(1, 2), log_sums[:, :, rows], block, log_sum)
            else:
                values[:, rows], log_sums[:, :, rows], begun = block.transpose(1, 2), log_sum, rows.start
        return values, (values, log_sums)

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, saved: Tensors) -> Tensors:
        """See `AttentionCore`."""
        return sum_block_gradients(grad, (query, key, value), saved, self._blocks(key.shape[2], mask), self.scale)

    def _blocks(self, seq: int, mask: Tensor | None) -> Iterator[KeyBlock]:
        for rows, span in self.cp.chunks(seq):
            if mask is not None:
                keys = slice(0, span.stop)
                yield KeyBlock(rows, keys, False, mask[:, :, rows, keys])
                continue
            if span.start:
                yield KeyBlock(rows, slice(0, span.start), False, None)
            yield KeyBlock(rows, slice(span.start, span.stop), True, None)


def sum_block_gradients(grad: Tensor, inputs: Tensors, results: Tensors, blocks: Iterable[KeyBlock], scale: float | None) -> Tensors:
    """Return the gradients of `inputs` (query [B, A, s, D], key and value [B, N, S, D]) from that of the values, [B, s, A, D], which the
    blocks add up. `results` are the values [B, s, A, D] and the log-sum-exp of each row [B, A, s]."""
    (query, key, value), (values, log_sums) = inputs, results
    grad, values = grad.transpose(1, 2), values.transpose(1, 2)
    totals = tuple(torch.zeros_like(each) for each in inputs)
    for rows, keys, causal, mask in blocks:
        block = grad[:, :, rows], query[:, :, rows], key[:, :, keys], value[:, :, keys], values[:, :, rows], log_sums[:, :, rows]
        block_grads = flash_block_gradients(*block, causal, mask, scale)
        for total, where, block_grad in zip(totals, (rows, keys, keys), block_grads, strict=True):
            total[:, :, where] += block_grad
    return totals


def add_block(values: Tensor, log_sums: Tensor, block: Tensor, log_sum: Tensor) -> None:
    """Add a block's values to the values [B, A, L, D] so far, in place, each weighted by its share of the sum of exponentials."""
    total = torch.logaddexp(log_sums, log_sum)
    values.copy_(values * torch.exp(log_sums - total).unsqueeze(-1) + block * torch.exp(log_sum - total).unsqueeze(-1))
    log_sums.copy_(total)


class FusedCore:
    """The fused kernel that torch chooses on a GPU, where that is not called block by block. Backward computes forward again: not all
    kernels return their log-sum-exp."""

    saves = False

    def __init__(self, cp: ContextParallel, scale: float | None = None) -> None:
        self.cp, self.scale = cp, scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensors]:
        """See `AttentionCore`."""
        parts = []
        for rows, span in self.cp.chunks(key.shape[2]):
            keys = slice(0, span.stop)
            bias = causal_lower_right(len(span), span.stop) if mask is None else mask[:, :, rows, keys]
            parts.append(flash_attention(query[:, :, rows], key[:, :, keys], value[:, :, keys], bias, self.scale).transpose(1, 2))
        return torch.cat(parts, dim=1), ()

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, saved: Tensors) -> Tensors:
        """See `AttentionCore`."""
        query, key, value = (each.detach().requires_grad_() for each in (query, key, value))
        with torch.enable_grad():
            values, _ = self.forward(query, key, value, mask)
        return torch.autograd.grad(values, (query, key, value), grad)


class ScoresCore:
    """Separate kernels. Saves the softmax's result and, with dropout, the mask and the result after dropout.

    `draw_mask` returns the dropout mask [B, A, s, S], of probability p, for S keys.
    """

    saves = True

    def __init__(
        self,
        cp: ContextParallel,
        p: float,
        draw_mask: Callable[[int], Tensor] | None,
        window: int | None = None,
        scale: float | None = None,
    ) -> None:
        self.cp, self.draw_mask, self.window, self.scale = cp, draw_mask, window, scale
        self.kept_scale = 1.0 / (1.0 - p)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensors]:
        """See `AttentionCore`."""
        mask = self._mask_with_window(query, key, mask)
        weights = attention_weights(query, key, mask, self.scale)  # [B, A, s, S]
        if self.draw_mask is None:
            return weighted_values(weights, value).transpose(1, 2), (weights,)
        dropped = self.draw_mask(key.shape[2])
        kept = weights.masked_fill(dropped, 0.0) * self.kept_scale
        return weighted_values(kept, value).transpose(1, 2), (weights, dropped, kept)

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, saved: Tensors) -> Tensors:
        """See `AttentionCore`."""
        weights, kept = saved[0], saved[-1]
        grad_rows = group_rows(grad.transpose(1, 2), value)  # [B, N, G s, D]
        value_grad = group_rows(kept, value).mT @ grad_rows
        weights_grad = (grad_rows @ value.mT).view_as(weights)
        if len(saved) > 1:
            weights_grad.masked_fill_(saved[1], 0.0).mul_(self.kept_scale)
        scale = score_scale(query, self.scale)
        scores_grad = torch.ops.aten._softmax_backward_data(weights_grad, weights, -1, weights.dtype).mul_(scale)
        scores_grad = group_rows(scores_grad, key)  # [B, N, G s, S]
        return (scores_grad @ key).view(query.shape), scores_grad.mT @ group_rows(query, key), value_grad

    def _mask_with_window(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        """Return the mask of documents [B, 1, s, S], or the causal one [s, S], without the keys before a query's window."""
        if mask is not None and self.window is None:
            return mask
        seq, device = key.shape[2], query.device
        queries, keys = self.cp.positions(seq, device)[:, None], torch.arange(seq, device=device)
        hidden = queries < keys if self.window is None else (queries < keys) | (keys <= queries - self.window)
        return (query.new_zeros(hidden.shape) if mask is None else mask).masked_fill(hidden, -torch.inf)
