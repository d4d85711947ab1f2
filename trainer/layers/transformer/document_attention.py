"""Causal attention inside documents without a mask: the kernel reads where each document starts.

A micro-batch [B, S] is one flat sequence of B S tokens, and each of its rows ends a document. On a GPU the kernel is FlashAttention-2 for
sequences of any lengths (arXiv:2307.08691), on a CPU torch's fused kernel, one document after another. How many documents there are and how
long the longest is differ from batch to batch. They are read from host memory inside an operator of our own, so that a GPU is not waited
for and a compiled layer has one graph for all batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...spec.derived.document_kernel import MOST_HEAD_DIM
from .core_attention import flash_block, flash_block_gradients, has_flash_attention, padded_heads, score_scale, window_band

# B batch, S sequence, T = B S tokens, A heads, N key and value heads, D head_dim, which values may have another of, W window

_GPU_FORWARD = torch.ops.aten._flash_attention_forward
_GPU_BACKWARD = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True, kw_only=True)
class DocumentBounds:
    """Where the documents of a micro-batch start. The sizes of both tensors depend on the micro-batch's size alone."""

    starts: Tensor  # [T + 1] int32: the flat position at which each document starts, then T in every place left
    counts: Tensor  # [2] int64, in host memory: documents, tokens of the longest

    def to(self, device: torch.device) -> DocumentBounds:
        """Return the bounds as a kernel of `device` reads them."""
        return DocumentBounds(starts=self.starts.to(device, non_blocking=True), counts=self.counts)

    def pin(self) -> DocumentBounds:
        """Return the bounds with pinned starts, from which copies to a GPU run beside its kernels."""
        return DocumentBounds(starts=self.starts.pin_memory(), counts=self.counts)


def document_bounds(documents: Tensor) -> DocumentBounds:
    """Return the bounds of documents [B, S], in host memory, which are marked by any number that changes from one to the next."""
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    tokens = documents.numel()
    starts = torch.full((tokens + 1,), tokens, dtype=torch.int32)
    places = torch.arange(tokens, dtype=torch.int32)
    starts[:-1] = torch.where(is_first.flatten(), places, tokens).sort().values
    return DocumentBounds(starts=starts, counts=torch.stack((is_first.sum(), starts.diff().max().long())))


def takes_documents(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether `document_attention` computes on a device, of heads of up to `head_dim` elements of a type."""
    if device.type != "cuda":
        return True
    return dtype in (torch.bfloat16, torch.float16) and head_dim <= MOST_HEAD_DIM and has_flash_attention()


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: DocumentBounds, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Return attention's values [B, S, A, D] for query [B, S, A, D], key and value [B, S, N, D].

    A token sees itself and the earlier tokens of its document, of which a `window` leaves the last W. Saves the values and a float32
    log-sum-exp of each query and head.
    """
    values: Tensor = _attend(query, key, value, bounds.starts, bounds.counts, window or 0, score_scale(query, scale))[0]
    return values


@torch.library.custom_op("distrain::document_attention", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, counts: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return (values [B, S, A, D], the log-sum-exp of each row of scores [A, T]); a window of 0 is none."""
    values, log_sums = _made(query, key, value, starts, counts, window, scale)
    flat = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    if query.is_cuda:
        padded, seen = padded_heads(*flat), _gpu_bounds(starts, counts)
        found, log_sums = _GPU_FORWARD(*padded, *seen, 0.0, True, False, scale=scale, **_gpu_window(window, counts))[:2]
        return found[..., : value.shape[-1]].contiguous().view(values.shape), log_sums
    for rows, keys, mask in _blocks(starts, counts, window, query):
        block, log_sum = flash_block(_one(flat[0], rows), _one(flat[1], keys), _one(flat[2], keys), mask is None, mask, scale)
        values.flatten(0, 1)[rows], log_sums[:, rows] = block[0].transpose(0, 1), log_sum[0]
    return values, log_sums


@_attend.register_fake
def _made(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, counts: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return tensors like the results, without their numbers."""
    tokens = query.shape[0] * query.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*query.shape[:3], value.shape[-1]), query.new_empty(query.shape[2], tokens, dtype=wide)


@torch.library.custom_op("distrain::document_attention_backward", mutates_args=())
def _gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    values: Tensor,
    log_sums: Tensor,
    starts: Tensor,
    counts: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value from that of the values [B, S, A, D]."""
    flat = tuple(each.flatten(0, 1) for each in (grad, query, key, value, values))
    if query.is_cuda:
        grad, *inputs = padded_heads(*flat)
        undrawn = query.new_empty(0, dtype=torch.int64)  # the state of dropout, which is not read
        sizes = *_gpu_bounds(starts, counts), 0.0, True, undrawn, undrawn
        found = _GPU_BACKWARD(grad, *inputs, log_sums, *sizes, scale=scale, **_gpu_window(window, counts))
    else:
        found = tuple(torch.zeros(each.shape, dtype=each.dtype) for each in flat[1:4])
        for rows, keys, mask in _blocks(starts, counts, window, query):
            inputs = [_one(each, where) for each, where in zip(flat, (rows, rows, keys, keys, rows), strict=True)]
            block = flash_block_gradients(*inputs, log_sums[None, :, rows], mask is None, mask, scale)
            for total, where, part in zip(found, (rows, keys, keys), block, strict=True):
                total[where] += part[0].transpose(0, 1)
    query_grad, key_grad, value_grad = (
        each[..., : of.shape[-1]].contiguous().view(of.shape) for each, of in zip(found, (query, key, value), strict=True)
    )
    return query_grad, key_grad, value_grad


@_gradients.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, counts, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, starts, counts)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(grad, *ctx.saved_tensors, ctx.window, ctx.scale), None, None, None, None


_attend.register_autograd(_backward, setup_context=_save)


def _gpu_bounds(starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Return the bounds of queries and of keys [documents + 1] and the tokens of the longest document, for both."""
    documents, longest = counts.tolist()
    return starts[: documents + 1], starts[: documents + 1], longest, longest


def _gpu_window(window: int, counts: Tensor) -> dict[str, int | None]:
    """Return how many keys before its own and behind it a query sees, as the GPU's kernel takes it."""
    return {"window_size_left": window - 1 if 0 < window < int(counts[1]) else None, "window_size_right": 0}


class DocumentBlock(NamedTuple):
    """Queries of one document and the keys that they see: of a causal block or as a mask says."""

    rows: slice
    keys: slice
    mask: Tensor | None


def _blocks(starts: Tensor, counts: Tensor, window: int, query: Tensor) -> Iterator[DocumentBlock]:
    """Yield each document as one block; one that is longer than a window in blocks of W queries, which see two blocks of keys."""
    documents, longest = counts.tolist()
    band = window_band(window, query.dtype, query.device) if 0 < window < longest else None
    for first, end in pairwise(starts[: documents + 1].tolist()):
        if band is None or end - first <= window:
            yield DocumentBlock(slice(first, end), slice(first, end), None)
            continue
        for begin in range(first, end, window):
            stop, key = min(begin + window, end), max(first, begin - window)
            seen = band[: stop - begin, key - begin + window : stop - begin + window]
            yield DocumentBlock(slice(begin, stop), slice(key, stop), seen if begin > first else None)


def _one(x: Tensor, where: slice) -> Tensor:
    """Return a part of x [T, A, D] as a sequence of its own, [1, A, L, D]."""
    return x[where].transpose(0, 1).unsqueeze(0)
