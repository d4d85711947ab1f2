"""Causal attention in which each query sees the last W keys: by FlashAttention-2's own windows on a GPU, and as a core for ranks that share
a sequence."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .context_parallel import ContextParallel, Tensors
from .core_attention import KeyBlock, flash_block, padded_heads, score_scale, sum_block_gradients, window_band

# B batch, S sequence, s this rank's part of it, A heads, N key and value heads, D head_dim, L queries, K keys, W window

_GPU_FORWARD = torch.ops.aten._flash_attention_forward
_GPU_BACKWARD = torch.ops.aten._flash_attention_backward


def gpu_window_values(query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return (values [B, L, A, D], the log-sum-exp of each row of scores [B, A, L]) of FlashAttention-2 for query [B, A, L, D], key and
    value [B, N, K, D]. The last query sees the last `window` keys, and each earlier query as many up to one earlier key; no window: all
    of them."""
    padded = (each.transpose(1, 2) for each in padded_heads(query, key, value))
    values, log_sums = _GPU_FORWARD(
        *padded, None, None, query.shape[2], key.shape[2], 0.0, True, False, scale=score_scale(query, scale), **_window_sizes(window)
    )[:2]
    return values[..., : value.shape[-1]].contiguous(), log_sums


def gpu_window_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, values: Tensor, log_sums: Tensor, window: int | None, scale: float | None
) -> Tensors:
    """Return the gradients of query, key and value from that of the values [B, L, A, D], for what `gpu_window_values` returned."""
    inputs = tuple(each.transpose(1, 2) for each in (query, key, value))
    padded = padded_heads(grad.contiguous(), *inputs, values)
    undrawn = query.new_empty(0, dtype=torch.int64)  # the state of dropout, which is not read
    sizes = None, None, query.shape[2], key.shape[2]  # no sequences apart
    options = {"scale": score_scale(query, scale), **_window_sizes(window)}
    grads = _GPU_BACKWARD(*padded, log_sums.contiguous(), *sizes, 0.0, True, undrawn, undrawn, **options)
    return tuple(each[..., : of.shape[-1]].transpose(1, 2) for each, of in zip(grads, inputs, strict=True))


def _window_sizes(window: int | None) -> dict[str, int | None]:
    """Return FlashAttention-2's window: the keys before a query's own, and those after it."""
    return {"window_size_left": None if window is None else window - 1, "window_size_right": None if window is None else 0}


class WindowedCore:
    """A window that is shorter than the sequence, on ranks that share it. Saves the values and one float32 per query and head.

    On a GPU each of this rank's two chunks is one call. On a CPU it is computed in pieces of W queries, which see the W keys before the
    piece and its own. No call has a mask of further keys.
    """

    saves = True

    def __init__(self, cp: ContextParallel, window: int, scale: float | None = None) -> None:
        self.cp, self.window, self.scale = cp, window, scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensors]:
        """See `AttentionCore`."""
        values = query.new_empty(*query.transpose(1, 2).shape[:3], value.shape[-1])  # [B, s, A, D]
        log_sums = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))  # [B, A, s]
        for rows, keys, causal, band in self._blocks(query, key.shape[2]):
            block = query[:, :, rows], key[:, :, keys], value[:, :, keys]
            if _is_on_gpu(query):
                values[:, rows], log_sums[:, :, rows] = gpu_window_values(*block, self.window, self.scale)
            else:
                found, log_sums[:, :, rows] = flash_block(*block, causal, band, self.scale)
                values[:, rows] = found.transpose(1, 2)
        return values, (values, log_sums)

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, saved: Tensors) -> Tensors:
        """See `AttentionCore`."""
        inputs, blocks = (query, key, value), self._blocks(query, key.shape[2])
        if not _is_on_gpu(query):
            return sum_block_gradients(grad, inputs, saved, blocks, self.scale)
        totals, (values, log_sums) = tuple(torch.zeros_like(each) for each in inputs), saved
        for rows, keys, _, _ in blocks:
            block = query[:, :, rows], key[:, :, keys], value[:, :, keys], values[:, rows], log_sums[:, :, rows]
            found = gpu_window_gradients(grad[:, rows], *block, self.window, self.scale)
            for total, where, part in zip(totals, (rows, keys, keys), found, strict=True):
                total[:, :, where] += part
        return totals

    def _blocks(self, query: Tensor, seq: int) -> Iterator[KeyBlock]:
        """Yield pieces of this rank's queries with the keys that they see."""
        window = self.window
        if _is_on_gpu(query):
            for rows, span in self.cp.chunks(seq):
                yield KeyBlock(rows, slice(max(0, span.start - window + 1), span.stop), True, None)
            return
        band = window_band(window, query.dtype, query.device)
        for rows, span in self.cp.chunks(seq):
            for begin in range(span.start, span.stop, window):
                end, first = min(begin + window, span.stop), max(0, begin - window)
                own = slice(rows.start + begin - span.start, rows.start + end - span.start)
                seen = band[: end - begin, first - begin + window : end - begin + window] if begin else None
                yield KeyBlock(own, slice(first, end), not begin, seen)


def _is_on_gpu(query: Tensor) -> bool:
    return query.is_cuda
