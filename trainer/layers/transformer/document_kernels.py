"""The fused kernels of attention inside documents: on a GPU FlashAttention-2 for sequences of any lengths (arXiv:2307.08691), on a CPU
torch's kernel, one document after another.

All take tensors [B, S, A, D] and the chunks of queries of document_bounds.py, which say how many documents there are and how long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .context_parallel import Tensors
from .core_attention import KeyBlock, add_block, flash_block, flash_block_gradients, padded_heads, window_band
from .document_bounds import DocumentChunk

# B batch, S sequence, s those of its tokens that have queries on this rank, A heads, N key and value heads, D head_dim, which values may
# have another of, L tokens of a document, W window; a window of 0 is none

_GPU_FORWARD = torch.ops.aten._flash_attention_forward
_GPU_BACKWARD = torch.ops.aten._flash_attention_backward
DOCUMENT_ROWS = 128  # queries whose float32 gradients FlashAttention-2's backward holds for each document, beside those of all queries


def empty_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return tensors for the values [B, s, A, D] and for the log-sum-exp of each row of scores [A, B s]."""
    queries, wide = query.shape[0] * query.shape[1], torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*query.shape[:3], value.shape[-1]), query.new_empty(query.shape[2], queries, dtype=wide)


def values_on_cpu(inputs: Tensors, chunks: Sequence[DocumentChunk], window: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return the values and the log-sum-exp for `inputs`: query [B, s, A, D], key and value [B, S, N, D]."""
    values, log_sums = empty_results(inputs[0], inputs[2])
    for chunk in chunks:
        query, key, value, made = (_sequence(each, chunk) for each in (*inputs, values))
        sums, begun = log_sums[None, :, chunk.sums], -1  # begun: the first of the queries whose blocks are being added up
        for rows, keys, causal, mask in _blocks(chunk, window, inputs[0]):
            own = slice(rows.start - chunk.queries.start, rows.stop - chunk.queries.start)
            block, log_sum = flash_block(_one(query, rows), _one(key, keys), _one(value, keys), causal, mask, scale)
            if rows.start == begun:
                add_block(_one(made, rows), sums[:, :, own], block, log_sum)
            else:
                _one(made, rows).copy_(block)
                sums[:, :, own], begun = log_sum, rows.start
    return values, log_sums


def gradients_on_cpu(
    grad: Tensor, inputs: Tensors, results: Tensors, chunks: Sequence[DocumentChunk], window: int, scale: float
) -> Tensors:
    """Return the gradients of `inputs` (query, key, value) from that of the values [B, s, A, D]; `results` are what forward returned."""
    totals = tuple(each.new_zeros(each.shape) for each in inputs)
    for chunk in chunks:
        value_grad, query, key, value, values, *sums = (_sequence(each, chunk) for each in (grad, *inputs, results[0], *totals))
        log_sums = results[1][None, :, chunk.sums]
        for rows, keys, causal, mask in _blocks(chunk, window, inputs[0]):
            own = slice(rows.start - chunk.queries.start, rows.stop - chunk.queries.start)
            block = _one(query, rows), _one(key, keys), _one(value, keys), _one(values, rows), log_sums[:, :, own]
            for total, where, part in zip(
                sums, (rows, keys, keys), flash_block_gradients(_one(value_grad, rows), *block, causal, mask, scale), strict=True
            ):
                _one(total, where).add_(part)
    return totals


def _blocks(chunk: DocumentChunk, window: int, query: Tensor) -> Iterator[KeyBlock]:
    """Yield each document's queries with the keys before their chunk as one block, and with those in it as another; under a window that is
    shorter than the document, blocks of W queries, which see two blocks of keys."""
    shift = chunk.queries.start - chunk.place  # from a place among the keys to one among the queries
    band = window_band(window, query.dtype, query.device) if 0 < window < chunk.longest[1] else None
    for first, end in pairwise(chunk.starts):
        begin = max(first, chunk.place)
        if band is None or end - first <= window:
            if first < begin:
                yield KeyBlock(slice(begin + shift, end + shift), slice(first, begin), False, None)
            yield KeyBlock(slice(begin + shift, end + shift), slice(begin, end), True, None)
            continue
        for at in range(begin, end, window):
            stop, key = min(at + window, end), max(first, at - window)
            seen = band[: stop - at, key - at + window : stop - at + window]
            yield KeyBlock(slice(at + shift, stop + shift), slice(key, stop), key == at, None if key == at else seen)


def values_on_gpu(inputs: Tensors, starts: Tensor, chunks: Sequence[DocumentChunk], window: int, scale: float) -> tuple[Tensor, Tensor]:
    """As `values_on_cpu`, in half precision; `starts` are the bounds on the GPU."""
    parts = []
    for chunk in chunks:
        query, key, value = (_sequence(each, chunk) for each in inputs)
        padded = padded_heads(query[chunk.queries], key[chunk.keys], value[chunk.keys])
        bounds, sizes = _gpu_bounds(chunk, starts, window)
        values, log_sums = _GPU_FORWARD(*padded, *bounds, 0.0, True, False, scale=scale, **sizes)[:2]
        parts.append((values[..., : value.shape[-1]].contiguous(), log_sums))
    values, log_sums = parts[0] if len(parts) == 1 else (torch.cat([each[0] for each in parts]), torch.cat([each[1] for each in parts], 1))
    return values.view(*inputs[0].shape[:3], -1), log_sums


def gradients_on_gpu(
    grad: Tensor, inputs: Tensors, results: Tensors, starts: Tensor, chunks: Sequence[DocumentChunk], window: int, scale: float
) -> Tensors:
    """As `gradients_on_cpu`, in half precision; `starts` are the bounds on the GPU."""
    undrawn = starts.new_empty(0, dtype=torch.int64)  # the state of dropout, which is not read
    totals: Tensors = () if len(chunks) == 1 else tuple(each.new_zeros(each.shape) for each in inputs)
    for chunk in chunks:
        rows, keys = chunk.queries, chunk.keys
        value_grad, query, key, value, values = (_sequence(each, chunk) for each in (grad, *inputs, results[0]))
        padded = padded_heads(value_grad[rows], query[rows], key[keys], value[keys], values[rows])
        bounds, sizes = _gpu_bounds(chunk, starts, window)
        log_sums = results[1][:, chunk.sums].contiguous()
        found = _GPU_BACKWARD(*padded, log_sums, *bounds, 0.0, True, undrawn, undrawn, scale=scale, **sizes)
        found = [each[..., : of.shape[-1]] for each, of in zip(found, inputs, strict=True)]
        if not totals:
            return tuple(each.contiguous().view(of.shape) for each, of in zip(found, inputs, strict=True))
        for total, where, part in zip(totals, (rows, keys, keys), found, strict=True):
            _sequence(total, chunk)[where] += part
    return totals


def _gpu_bounds(chunk: DocumentChunk, starts: Tensor, window: int) -> tuple[tuple[Tensor, Tensor, int, int], dict[str, int | None]]:
    """Return the bounds [documents + 1] of a chunk's queries and of their keys, the most of each in a document, and the window.

    The last query of a document sees its last key.
    """
    own = starts[chunk.documents]
    queries, keys = own, own
    if chunk.row is not None or chunk.place:
        queries = (own - (chunk.offset + chunk.place)).clamp(0, chunk.keys.stop - chunk.place)
        keys = (own - (chunk.offset + chunk.keys.start)).clamp(max=chunk.keys.stop - chunk.keys.start)
    longest = chunk.longest
    left = window - 1 if 0 < window < longest[1] else None
    return (queries, keys, *longest), {"window_size_left": left, "window_size_right": 0}


def _sequence(x: Tensor, chunk: DocumentChunk) -> Tensor:
    """Return the row of x [B, S, A, D] that a chunk is of, or all rows as one sequence: [S or B S, A, D]."""
    return x.flatten(0, 1) if chunk.row is None else x[chunk.row]


def _one(x: Tensor, where: slice) -> Tensor:
    """Return tokens of x [S, A, D] as a sequence of their own, [1, A, L, D]."""
    return x[where].transpose(0, 1).unsqueeze(0)
