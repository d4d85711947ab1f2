"""The head and its cross entropy together, in chunks of the vocabulary: the logits of one chunk alone are held.

Forward keeps the head's input and one float32 a token, the log-sum-exp of its logits. Backward computes a chunk's logits again, replaces
them by their gradient, and makes of it this chunk's part of the weight's gradient and its terms of the input's. Liger Kernel
(arXiv:2410.10989 section 3.2) cuts tokens instead, and adds up the weight's gradient over the chunks; here each of its elements is one sum
over all tokens, as without chunks, and what is added up over the chunks is the input's gradient, in its own type, as tensor-parallel ranks
do. Cut Cross-Entropy (arXiv:2411.09009) holds no logits in memory at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..spec.derived.loss_chunks import chunk_size
from .cross_entropy import IGNORED, chunk_statistics, replace_by_gradient, sum_ranks
from .group_messages import AsyncAllGather, AsyncAllReduce, AsyncReduceScatter
from .loss_kernels import RowStatistics
from .tensor_parallel import TensorParallel

# B batch, S sequence, s this rank's part of it under sequence parallelism, R = B S rows, H hidden, V vocabulary: this rank's part of it


def chunked_token_losses(
    x: Tensor, weight: Tensor, labels: Tensor, vocab: int, tp: TensorParallel | None, chunks: int, *, transposed: bool, z_loss: float = 0.0
) -> Tensor:
    """Return what `token_losses` does of the logits x W [B, S, V], [B S], for x [B, S or s, H] and weight [H, V] (transposed: [V, H]).

    The messages between tensor-parallel ranks are those of the head and of `cross_entropy`, each for all tokens. Backward computes the
    weight's gradient too: it is not deferred, for the gradient of a chunk's logits is not kept.
    """
    losses: Tensor = _ChunkedLoss.apply(x, weight, labels, vocab, tp, chunks, transposed, z_loss)  # type: ignore[no-untyped-call]
    return losses


class _ChunkedLoss(torch.autograd.Function):
    """Saves the head's input as it came, and the log-sum-exp of each row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab: int,
        tp: TensorParallel | None,
        chunks: int,
        transposed: bool,
        z_loss: float,
    ) -> Tensor:
        rows, labels = _whole_rows(x, tp), labels.flatten()
        columns = weight.mT if transposed else weight  # [H, V]
        ctx.first = tp.group.rank * columns.shape[1] if tp else 0
        ctx.width = max(0, min(vocab - ctx.first, columns.shape[1]))  # of this rank's logits, those that are not padding
        ctx.tp, ctx.chunks, ctx.transposed, ctx.z_loss = tp, _chunks(columns.shape[1], chunks), transposed, z_loss
        statistics = _row_statistics(rows, columns, labels - ctx.first, ctx.width, ctx.chunks)
        log_sum, label_logit = sum_ranks(*statistics, tp)
        ctx.save_for_backward(x, weight, labels, log_sum)
        return torch.where(labels == IGNORED, 0.0, log_sum - label_logit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, labels, log_sum = ctx.saved_tensors
        local, scale = labels - ctx.first, (labels != IGNORED) * grad
        rows, columns = _whole_rows(x, ctx.tp), weight.mT if ctx.transposed else weight
        rows_grad = torch.empty_like(rows)  # this rank's terms
        weight_grad = weight.new_empty(weight.shape) if ctx.needs_input_grad[1] else None
        for chunk in ctx.chunks:
            logits = rows @ columns[:, chunk]  # [R, chunk]
            counted = _unpadded_count(ctx.width, chunk)
            replace_by_gradient(logits, local - chunk.start, log_sum, scale, counted, ctx.z_loss)
            torch.addmm(rows_grad, logits, columns[:, chunk].mT, beta=int(chunk.start > 0), out=rows_grad)
            if weight_grad is not None and ctx.transposed:
                torch.mm(logits.mT, rows, out=weight_grad[chunk])
            elif weight_grad is not None:
                torch.mm(rows.mT, logits, out=weight_grad[:, chunk])
            del logits  # the next ones take their memory
        del rows
        return _sum_terms(rows_grad, x, ctx.tp), weight_grad, None, None, None, None, None, None


def _whole_rows(x: Tensor, tp: TensorParallel | None) -> Tensor:
    """Return the rows [R, H] of x [B, S or s, H], gathered along the sequence where it is split."""
    whole = AsyncAllGather(x, tp.group).wait() if tp is not None and tp.sequence else x
    return whole.flatten(0, -2)


def _sum_terms(rows_grad: Tensor, x: Tensor, tp: TensorParallel | None) -> Tensor:
    """Return the gradient of x [B, S or s, H] from this rank's terms of the whole one, [R, H]."""
    whole = rows_grad.view(x.shape[0], -1, x.shape[-1])
    if tp is None:
        return whole
    return AsyncReduceScatter(whole, tp.group).wait() if tp.sequence else AsyncAllReduce(whole, tp.group).wait()


def _row_statistics(rows: Tensor, columns: Tensor, local: Tensor, width: int, chunks: list[slice]) -> RowStatistics:
    """Return loss_kernels.py's `row_statistics` of all of this rank's logits, of rows [R, H] and columns [H, V]; `local` are labels counted
    from this rank's first token."""
    found: RowStatistics | None = None
    for chunk in chunks:
        if counted := _unpadded_count(width, chunk):
            each = chunk_statistics(rows @ columns[:, chunk], local - chunk.start, counted)
            found = each if found is None else _joint_statistics(found, each)
    if found is None:  # all of this rank's tokens are padding
        zeros = rows.new_zeros(rows.shape[0], dtype=torch.promote_types(rows.dtype, torch.float32))
        found = zeros - torch.inf, zeros, zeros.clone()
    return found


def _joint_statistics(one: RowStatistics, other: RowStatistics) -> RowStatistics:
    """Return the statistics of two chunks together, in the place of the first's."""
    largest = torch.maximum(one[0], other[0])
    total = one[1].mul_(torch.exp(one[0] - largest)).add_(other[1] * torch.exp(other[0] - largest))
    return largest, total, one[2].add_(other[2])


def _chunks(vocab: int, chunks: int) -> list[slice]:
    """Return the chunks of so many logits of a row; fewer where they would be smaller than chunk_size's multiple."""
    size = chunk_size(vocab, chunks)
    return [slice(first, min(first + size, vocab)) for first in range(0, vocab, size)]


def _unpadded_count(width: int, chunk: slice) -> int:
    """Return how many of a chunk's logits are among the first `width`."""
    counted: int = max(0, min(width - chunk.start, chunk.stop - chunk.start))
    return counted
