"""Cross entropy over a vocabulary, whole or split over tensor-parallel ranks: the logits are never gathered.

chunked_loss.py computes it together with the head, a chunk of the vocabulary at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import loss_kernels
from .dtypes import at_least_float32
from .group_messages import all_reduce
from .tensor_parallel import TensorParallel

# B batch, S sequence, V vocabulary (padded; this rank's part of it), R = B S rows

IGNORED = -100  # a label that the loss does not count, as torch.nn.functional.cross_entropy's ignore_index
_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}  # logits that are float32 at a time: what fits a cache, what fills a GPU


def cross_entropy(
    logits: Tensor, labels: Tensor, vocab: int, tp: TensorParallel | None = None, *, z_loss: float = 0.0, keep_logits: bool = False
) -> Tensor:
    """Return the sum of -log softmax(logits [B, S, V]) at the labels [B, S] that count, over the first `vocab` tokens; float32.

    With `tp` each rank has the logits of its part of the vocabulary, and all ranks return the sum. `z_loss` adds to the gradients, not to
    the sum: the gradient of `z_loss` times the square of log sum exp(logits), summed over the same tokens (arXiv:2204.02311 section 5). On
    a GPU backward writes the logits' gradient in their place, unless `keep_logits`: then in a copy, for a caller whose own backward reads
    them.
    """
    return token_losses(logits, labels, vocab, tp, z_loss=z_loss, keep_logits=keep_logits).sum()


def token_losses(
    logits: Tensor, labels: Tensor, vocab: int, tp: TensorParallel | None = None, *, z_loss: float = 0.0, keep_logits: bool = False
) -> Tensor:
    """Return the terms of `cross_entropy`'s sum, [B S]; 0 of labels that don't count."""
    given = logits.flatten(0, -2), labels.flatten(), vocab, tp, z_loss, keep_logits
    losses: Tensor = _CrossEntropy.apply(*given)  # type: ignore[no-untyped-call]
    return losses


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits as they came and one float32 per row. On a GPU each pass is one kernel (loss_kernels.py); elsewhere it converts some
    rows at a time to float32, never all of them."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab: int, tp: TensorParallel | None, z_loss: float, keep_logits: bool
    ) -> Tensor:
        ctx.first = tp.group.rank * logits.shape[1] if tp else 0
        ctx.width = max(0, min(vocab - ctx.first, logits.shape[1]))  # of this rank's logits, those that are not padding
        ctx.z_loss, ctx.keep_logits = z_loss, keep_logits
        log_sum, label_logit = _log_sums_and_label_logits(logits, labels - ctx.first, ctx.width, tp)
        ctx.save_for_backward(logits, labels, log_sum)
        return torch.where(labels == IGNORED, 0.0, log_sum - label_logit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, log_sum = ctx.saved_tensors
        scale = (labels != IGNORED) * grad
        if loss_kernels.has_loss_kernels(logits.device):
            given = logits.clone() if ctx.keep_logits else logits
            with loss_kernels.give_up_where_compiling_fails():
                loss_kernels.loss_gradient(given, labels - ctx.first, log_sum, scale, ctx.width, ctx.z_loss)
                return given, None, None, None, None, None
        logits_grad = torch.zeros_like(logits) if ctx.width < logits.shape[1] else torch.empty_like(logits)
        _write_gradient(logits_grad, logits, labels - ctx.first, log_sum, scale, ctx.width, ctx.z_loss)
        return logits_grad, None, None, None, None, None


def replace_by_gradient(logits: Tensor, local: Tensor, log_sum: Tensor, scale: Tensor, width: int, z_loss: float) -> None:
    """Replace logits [R, V], of which the first `width` count, by their gradient, (softmax - one-hot label) x scale and that of `z_loss`;
    `local` are labels [R] counted from the first of these logits."""
    if loss_kernels.has_loss_kernels(logits.device):
        with loss_kernels.give_up_where_compiling_fails():
            loss_kernels.loss_gradient(logits, local, log_sum, scale, width, z_loss)
            return
    _write_gradient(logits, logits, local, log_sum, scale, width, z_loss)
    logits[:, width:] = 0.0


def _write_gradient(logits_grad: Tensor, logits: Tensor, local: Tensor, log_sum: Tensor, scale: Tensor, width: int, z_loss: float) -> None:
    """Write the gradient of logits [R, V] that are no padding, some rows in float32 at a time; it may take the logits' place."""
    for rows in _chunks(logits):
        label = local[rows, None]  # [rows, 1]
        softmax = torch.exp(at_least_float32(logits[rows, :width]) - log_sum[rows, None])
        if z_loss:
            softmax.mul_(loss_kernels.softmax_weight(log_sum[rows, None], z_loss))
        here = (label >= 0) & (label < width)
        if width:
            softmax.scatter_add_(1, label.clamp(0, width - 1), -here.to(softmax.dtype))
        logits_grad[rows, :width] = softmax.mul_(scale[rows, None])


def chunk_statistics(logits: Tensor, local: Tensor, width: int) -> loss_kernels.RowStatistics:
    """Return loss_kernels.py's `row_statistics` of some of a rank's logits [R, V]; `local` are labels counted from the first of these."""
    if loss_kernels.has_loss_kernels(logits.device):
        with loss_kernels.give_up_where_compiling_fails():
            found: loss_kernels.RowStatistics = loss_kernels.loss_rows(logits, local, width)
            return found
    parts = [loss_kernels.row_statistics(logits[rows], local[rows], width) for rows in _chunks(logits)]
    largest, total, label_logit = (torch.cat(column) for column in zip(*parts, strict=True))
    return largest, total, label_logit


def _log_sums_and_label_logits(logits: Tensor, local: Tensor, width: int, tp: TensorParallel | None) -> tuple[Tensor, Tensor]:
    """Return (log-sum-exp over the whole vocabulary, the label's logit) of each row [R]; `local` are labels counted from this rank's
    first token."""
    found: loss_kernels.RowStatistics | None = None
    if width and loss_kernels.has_loss_kernels(logits.device):
        with loss_kernels.give_up_where_compiling_fails():
            found = loss_kernels.loss_rows(logits, local, width)
    if found:
        return sum_ranks(*found, tp)
    here = (local >= 0) & (local < width)
    log_sum, label_logit = (at_least_float32(logits.new_zeros(logits.shape[0])) for _ in range(2))
    if tp is None:
        for rows in _chunks(logits):
            chunk = at_least_float32(logits[rows, :width])
            log_sum[rows] = torch.logsumexp(chunk, dim=-1)
            label_logit[rows] = _label_logits(chunk, local[rows], here[rows])
        return log_sum, label_logit
    largest = torch.full_like(log_sum, -torch.inf)
    for rows in _chunks(logits) if width else []:
        chunk = at_least_float32(logits[rows, :width])
        largest[rows] = chunk.amax(-1)
        label_logit[rows] = _label_logits(chunk, local[rows], here[rows])
        del chunk  # the next one takes its memory
    all_reduce(largest, tp.group, dist.ReduceOp.MAX)
    total = torch.zeros_like(largest)  # of exponentials
    for rows in _chunks(logits) if width else []:
        total[rows] = torch.exp(at_least_float32(logits[rows, :width]) - largest[rows, None]).sum(-1)
    all_reduce(total, tp.group)
    return total.log_().add_(largest), all_reduce(label_logit, tp.group)


def sum_ranks(largest: Tensor, total: Tensor, label_logit: Tensor, tp: TensorParallel | None) -> tuple[Tensor, Tensor]:
    """Return (log-sum-exp over the whole vocabulary, the label's logit) of each row [R], of this rank's largest logits, sums of
    exp(logit - largest) and labels' logits [R]."""
    if tp is None:
        return total.log_().add_(largest), label_logit
    own = largest.clone()
    all_reduce(largest, tp.group, dist.ReduceOp.MAX)
    all_reduce(total.mul_(torch.exp(own - largest)), tp.group)
    return total.log_().add_(largest), all_reduce(label_logit, tp.group)


def _label_logits(chunk: Tensor, local: Tensor, here: Tensor) -> Tensor:
    """Return the logit of each row's label [rows]; 0 where another rank has it."""
    logits = chunk.gather(1, local.clamp(0, chunk.shape[1] - 1)[:, None])[:, 0]
    return torch.where(here, logits, 0.0)


def _chunks(logits: Tensor) -> list[slice]:
    """Return slices of the rows of logits [R, V], each of about _CHUNK logits."""
    rows = max(1, _CHUNK.get(logits.device.type, 1 << 26) // logits.shape[1])
    return [slice(first, first + rows) for first in range(0, logits.shape[0], rows)]
