"""Causal attention inside documents without a mask: its kernels read where each document starts (document_kernels.py).

How many documents a micro-batch has and how long they are differs from batch to batch. An operator of our own reads that in host memory, so
that a GPU is not waited for and a compiled layer has one graph for all batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...spec.derived.document_kernel import MOST_HEAD_DIM
from .context_parallel import ContextParallel, Tensors
from .core_attention import has_flash_attention, score_scale
from .document_bounds import DocumentBounds, DocumentChunk, document_chunks
from .document_kernels import DOCUMENT_ROWS, empty_results, gradients_on_cpu, gradients_on_gpu, values_on_cpu, values_on_gpu

# B batch, S sequence, s those of its tokens that have queries on this rank, A heads, N key and value heads, D head_dim, which values may
# have another of, W window


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
    values: Tensor = _attend(query, key, value, bounds.starts, bounds.host, [], window or 0, score_scale(query, scale))[0]
    return values


class DocumentCore:
    """The core of attention inside documents on ranks that share the sequence: as `document_attention`, for the queries of two chunks."""

    saves = True

    def __init__(self, cp: ContextParallel, bounds: DocumentBounds, window: int | None = None, scale: float | None = None) -> None:
        self.cp, self.bounds, self.window, self.scale = cp, bounds, window, scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensors]:
        """See `AttentionCore`."""
        saved = _attend(*(each.transpose(1, 2) for each in (query, key, value)), *self._further(query, key))
        return saved[0], saved

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, saved: Tensors) -> Tensors:
        """See `AttentionCore`."""
        inputs = (each.transpose(1, 2) for each in (query, key, value))
        return tuple(each.transpose(1, 2) for each in _gradients(grad, *inputs, *saved, *self._further(query, key)))

    def _further(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, list[int], int, float]:
        """Return the operator's further arguments."""
        spans = [span.start for _, span in self.cp.chunks(key.shape[2])]
        return self.bounds.starts, self.bounds.host, spans, self.window or 0, score_scale(query, self.scale)


@torch.library.custom_op("distrain::document_attention", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, host: Tensor, spans: Sequence[int], window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (values [B, s, A, D], the log-sum-exp of each row of scores [A, B s]) for query [B, s, A, D], key and value [B, S, N, D].

    `spans` are as `document_chunks` has them; a window of 0 is none.
    """
    inputs, chunks = (query, key, value), _chunks(query, key, host, spans)
    if query.is_cuda:
        return values_on_gpu(inputs, starts, chunks, window, scale)
    return values_on_cpu(inputs, chunks, window, scale)


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_results(query, value)


@torch.library.custom_op("distrain::document_attention_backward", mutates_args=())
def _gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    values: Tensor,
    log_sums: Tensor,
    starts: Tensor,
    host: Tensor,
    spans: Sequence[int],
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value from that of the values [B, s, A, D]."""
    inputs, chunks = (query, key, value), _chunks(query, key, host, spans)
    if query.is_cuda:
        found = gradients_on_gpu(grad.contiguous(), inputs, (values, log_sums), starts, chunks, window, scale)
    else:
        found = gradients_on_cpu(grad, inputs, (values, log_sums), chunks, window, scale)
    query_grad, key_grad, value_grad = found
    return query_grad, key_grad, value_grad


@_gradients.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, host, *ctx.further = inputs
    ctx.save_for_backward(query, key, value, *output, starts, host)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(grad, *ctx.saved_tensors, *ctx.further), None, None, None, None, None


_attend.register_autograd(_backward, setup_context=_save)


def _chunks(query: Tensor, key: Tensor, host: Tensor, spans: Sequence[int]) -> list[DocumentChunk]:
    """Return the chunks of queries; on a GPU in parts of so few documents that backward holds no more for them than for the micro-batch's
    queries."""
    batch, queries = query.shape[:2]
    most = max(1, batch * queries // DOCUMENT_ROWS) if query.is_cuda else None
    return list(document_chunks(host, batch, queries, key.shape[1], spans, most))
