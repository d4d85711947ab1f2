"""Cross entropy over a vocabulary, whole or split over the ranks of a group: the logits are never gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .split_linear import Region, summed

# B batch, S sequence, V vocabulary (padded; this rank's part of it)

IGNORED = -100  # a label that does not count
_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}  # logits that are float32 at once: what stays in a cache, what fills a GPU


def cross_entropy(logits: Tensor, labels: Tensor, vocab: int, region: Region | None = None) -> Tensor:
    """The sum over labels [B, S] that count of -log softmax(logits [B, S, V]), of the first `vocab` words; float32.

    In a region each rank has the logits of its part of the words; all get the sum.
    """
    loss: Tensor = _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), vocab, region)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits as they came and a float32 a token, and widens some rows at a time: never a float32 copy of all of them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab: int, region: Region | None) -> Tensor:
        first = region.group.rank * logits.shape[1] if region else 0
        ctx.words = max(0, min(vocab - first, logits.shape[1]))  # of this rank's, those that are no padding
        local = labels - first
        ctx.first = first
        total, wanted = _counted(logits, local, ctx.words, region)
        ctx.save_for_backward(logits, labels, total)
        return torch.where(labels == IGNORED, 0.0, total - wanted).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, total = ctx.saved_tensors
        words = ctx.words
        by_logits = torch.zeros_like(logits) if words < logits.shape[1] else torch.empty_like(logits)
        for rows in _chunks(logits):
            label = labels[rows, None]  # [rows, 1]
            each = torch.exp(wide(logits[rows, :words]) - total[rows, None])
            here = (label >= ctx.first) & (label < ctx.first + words)
            if words:
                each.scatter_add_(1, (label - ctx.first).clamp(0, words - 1), -here.to(each.dtype))
            by_logits[rows, :words] = each.mul_((label != IGNORED) * grad)
        return by_logits, None, None, None


def _counted(logits: Tensor, local: Tensor, words: int, region: Region | None) -> tuple[Tensor, Tensor]:
    """(log of the sum of exponentials, the label's own logit) of each row, over all ranks' words; `local` are labels as counted here."""
    here = (local >= 0) & (local < words)
    most, wanted = (wide(logits.new_zeros(logits.shape[0])) for _ in range(2))
    if region is None:
        for rows in _chunks(logits):
            each = wide(logits[rows, :words])
            most[rows] = torch.logsumexp(each, dim=-1)
            wanted[rows] = _own(each, local[rows], here[rows])
        return most, wanted
    most.fill_(-torch.inf)
    for rows in _chunks(logits) if words else []:
        each = wide(logits[rows, :words])
        most[rows] = each.amax(-1)
        wanted[rows] = _own(each, local[rows], here[rows])
    summed(most, region.group, dist.ReduceOp.MAX)
    total = torch.zeros_like(most)
    for rows in _chunks(logits) if words else []:
        total[rows] = torch.exp(wide(logits[rows, :words]) - most[rows, None]).sum(-1)
    summed(total, region.group)
    return total.log_().add_(most), summed(wanted, region.group)


def _own(each: Tensor, local: Tensor, here: Tensor) -> Tensor:
    """The logit of each row's label [rows], 0 where it is elsewhere."""
    found = each.gather(1, local.clamp(0, each.shape[1] - 1)[:, None])[:, 0]
    return torch.where(here, found, 0.0)


def _chunks(logits: Tensor) -> list[slice]:
    """The rows of logits [B S, V], few enough at a time."""
    rows = max(1, _CHUNK.get(logits.device.type, 1 << 26) // logits.shape[1])
    return [slice(first, first + rows) for first in range(0, logits.shape[0], rows)]


def wide(x: Tensor) -> Tensor:
    """In float32, or wider where it was."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
