"""Experts: stacks of matrices, each of which multiplies its own rows, here or on the ranks of a group (arXiv:2006.16668)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .group import Group
from .split_linear import Held

# C rows, E experts, e = E / R of them here, R ranks of the group, I inner, O outer, T tokens, K copies of each


class ExpertLinear(nn.Module):
    """x W of each expert's own rows."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self.weight = held["weight"]

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [C, I], of which those of expert e end at `ends[e]` -> [C, O]."""
        made: Tensor = _Grouped.apply(x, self.weight, ends)  # type: ignore[no-untyped-call]
        return made


class _Grouped(torch.autograd.Function):
    """Saves the rows and the parameter itself. An expert without rows has a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return grouped(x, weight, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        return grouped(grad, weight.mT, ends), grouped_weights(x, grad, ends), None


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows x [C, I] each by the matrix of its expert, of weight [E, I, O]: [C, O]."""
    if _fused(x, weight):
        return F.grouped_mm(x, weight, offs=ends.int())
    made = x.new_empty(x.shape[0], weight.shape[2])
    for expert, (first, last) in enumerate(pairwise([0, *ends.tolist()])):
        torch.mm(x[first:last], weight[expert], out=made[first:last])
    return made


def grouped_weights(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """The gradient [E, I, O] of each expert's matrix, by its rows x [C, I] and their gradients [C, O]."""
    if _fused(x, grad):
        return F.grouped_mm(x.mT, grad, offs=ends.int())
    made = x.new_empty(ends.shape[0], x.shape[1], grad.shape[1])
    for expert, (first, last) in enumerate(pairwise([0, *ends.tolist()])):
        torch.mm(x[first:last].mT, grad[first:last], out=made[expert])
    return made


def _fused(x: Tensor, other: Tensor) -> bool:
    """Whether one kernel does all experts: on a GPU, in bf16, rows of 16 bytes. Then the host need not know how many rows each has,
    but for that there are some: of a rank to which no token was sent there are none."""
    return x.is_cuda and len(x) > 0 and x.dtype == torch.bfloat16 and x.shape[-1] % 8 == 0 and other.shape[-1] % 8 == 0


def copied(x: Tensor, order: Tensor, copies: int) -> Tensor:
    """Rows of tokens x [T, H], those of the copies `order` [C], which are numbered token by token: [C, H]."""
    made: Tensor = _Copied.apply(x, order, copies)  # type: ignore[no-untyped-call]
    return made


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.tokens, ctx.copies = x.shape[0], copies
        return x[order // copies]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return _placed(grad, order, ctx.tokens * ctx.copies).view(ctx.tokens, ctx.copies, -1).sum(1), None, None


def combined(x: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """Each token's sum of its copies' rows, times weights [T, K]: of x [C, H], those of the copies `order` [C], [T, H]."""
    made: Tensor = _Combined.apply(x, weights, order)  # type: ignore[no-untyped-call]
    return made


class _Combined(torch.autograd.Function):
    """Saves the rows as they came, in the experts' order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, order)
        copies = _placed(x, order, weights.numel()).view(*weights.shape, -1)  # [T, K, H]
        return copies.mul_(weights.to(x.dtype).unsqueeze(-1)).sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights, order = ctx.saved_tensors
        each = grad[order // weights.shape[1]]  # [C, H]
        by_weights = _placed((each * x).sum(-1, dtype=weights.dtype), order, weights.numel())
        return each.mul_(weights.flatten()[order].to(x.dtype).unsqueeze(-1)), by_weights.view_as(weights), None


def _placed(x: Tensor, order: Tensor, many: int) -> Tensor:
    """Rows x [C, ...] where their numbers `order` say, of so many; 0 where there is none. Unlike a sum by index, always in one order."""
    made = x.new_zeros(many, *x.shape[1:]) if len(order) < many else x.new_empty(many, *x.shape[1:])
    return made.index_copy_(0, order, x)


@dataclass(frozen=True, kw_only=True)
class Trip:
    """Rows on their way to the ranks of their experts and back: how many go to each rank and come from each.

    `order` [C'] sorts what has come, by rank, by expert; of this rank's expert e rows end at `ends[e]` then.
    """

    group: Group
    sends: list[int]
    receives: list[int]
    order: Tensor
    ends: Tensor  # [e]


def trip(ends: Tensor, group: Group) -> Trip:
    """Each rank tells each other how many rows it has for whom; `ends` [E] are those of the rows here, by expert."""
    sends = ends.diff(prepend=ends.new_zeros(1)).view(group.size, -1)  # [R, e]
    receives = torch.empty_like(sends)
    dist.all_to_all_single(receives, sends.contiguous(), group=group.handle)
    whose = torch.arange(receives.shape[1], device=ends.device).repeat(group.size)  # [R e]
    return Trip(
        group=group,
        sends=sends.sum(1).tolist(),
        receives=receives.sum(1).tolist(),
        order=whose.repeat_interleave(receives.flatten()).sort(stable=True).indices,
        ends=receives.sum(0).cumsum(0),
    )


def there(x: Tensor, by: Trip) -> Tensor:
    """Rows x [C, H], by expert, to the ranks of their experts: those of this rank's, by expert, [C', H]."""
    made: Tensor = _There.apply(x, by)  # type: ignore[no-untyped-call]
    return made


def back(x: Tensor, by: Trip) -> Tensor:
    """What this rank's experts have made of such rows, x [C', H], back to where each came from: [C, H]."""
    made: Tensor = _Back.apply(x, by)  # type: ignore[no-untyped-call]
    return made


class _There(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Trip) -> Tensor:
        ctx.by = by
        return _out(x, by)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _home(grad, ctx.by), None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Trip) -> Tensor:
        ctx.by = by
        return _home(x, by)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _out(grad, ctx.by), None


def _out(x: Tensor, by: Trip) -> Tensor:
    made = x.new_empty(sum(by.receives), x.shape[1])
    dist.all_to_all_single(made, x.contiguous(), by.receives, by.sends, group=by.group.handle)
    return made[by.order]


def _home(x: Tensor, by: Trip) -> Tensor:
    made = x.new_empty(sum(by.sends), x.shape[1])
    dist.all_to_all_single(made, torch.empty_like(x).index_copy_(0, by.order, x), by.sends, by.receives, group=by.group.handle)
    return made
