"""Tensor-parallel layers: f and g of Megatron-LM (arXiv:1909.08053 section 3), and their sequence-parallel pair (arXiv:2205.05198
section 4.2.2).

Heads, feed-forward and vocabulary are split over the ranks of a group. f stands before what is split: nothing in forward, a sum
over the group in backward; g after it, the reverse. Where the rest is split along the sequence too, f gathers it and scatters the
sum of its gradients, and g scatters the sum of its results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .group import Group

# B batch, S sequence, s = S / T of it, H hidden, T ranks of the group, I inner, O outer: this rank's columns

Held = Mapping[str, nn.Parameter]  # a layer's parameters by their names inside it


@dataclass(frozen=True, kw_only=True)
class Region:
    """What the ranks of a group split: heads, feed-forward, vocabulary; `sequence`: the rest too.

    This rank's query heads are those from `first_head` on, the last `no_heads` of them padding.
    """

    group: Group
    sequence: bool
    first_head: int = 0
    no_heads: int = 0

    def shard(self, x: Tensor) -> Tensor:
        """Of x [..., S, ...] along dim 1 what this rank has outside of split layers: all, or its run of the sequence."""
        if not self.sequence:
            return x
        return x.chunk(self.group.size, dim=1)[self.group.rank]


def f(x: Tensor, region: Region) -> Tensor:
    """What a split layer takes in, whole: x [B, S or s, H] -> [B, S, H]."""
    given: Tensor = _Gather.apply(x, region.group) if region.sequence else _Copy.apply(x, region.group)  # type: ignore[no-untyped-call]
    return given


def g(x: Tensor, region: Region) -> Tensor:
    """The sum over the group of what a split layer makes: x [B, S, H] -> [B, S or s, H]. x itself is overwritten."""
    made: Tensor = _Scatter.apply(x, region.group) if region.sequence else _Sum.apply(x, region.group)  # type: ignore[no-untyped-call]
    return made


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad.contiguous().clone(), ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(x)
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return Gathering(x, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Scattering(grad, ctx.group).wait(), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return Scattering(x, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Gathering(grad, ctx.group).wait(), None


def summed(x: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """x, contiguous, summed over a group in place."""
    dist.all_reduce(x, op=op, group=group.handle)
    return x


class Gathering:
    """An all-gather of runs of the sequence [B, s, ...] under way: the wait gives [B, S, ...]."""

    def __init__(self, x: Tensor, group: Group) -> None:
        self.ranks, self.own = group.size, x.contiguous()
        self.made = x.new_empty((group.size * x.shape[0], *x.shape[1:]))  # [T B, s, ...]
        self.work = dist.all_gather_into_tensor(self.made, self.own, group=group.handle, async_op=True)

    def wait(self) -> Tensor:
        self.work.wait()
        return torch.unflatten(self.made, 0, (self.ranks, -1)).transpose(0, 1).flatten(1, 2)


class Scattering:
    """A reduce-scatter of [B, S, ...] under way: the wait gives this rank's run of the sum, [B, s, ...]."""

    def __init__(self, x: Tensor, group: Group) -> None:
        self.given = torch.unflatten(x, 1, (group.size, -1)).transpose(0, 1).contiguous()  # [T, B, s, ...]
        self.made = torch.empty_like(self.given[0])
        self.work = dist.reduce_scatter_tensor(self.made, self.given.flatten(0, 1), group=group.handle, async_op=True)

    def wait(self) -> Tensor:
        self.work.wait()
        return self.made


class Linear(nn.Module):
    """x W + b. What is saved for backward is the parameter, never a view of it: ZeRO-3 lets go of its memory in between."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self.weight = held["weight"]
        self.bias = held.get("bias")

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W + b of x [..., I], weight [I, O]."""
    if bias is None:
        return x @ weight
    return torch.addmm(bias, x.flatten(0, -2), weight).view(*x.shape[:-1], -1)


class ColumnLinear(Linear):
    """x W + b whose columns are split: f, then each rank its own outputs. `region` None: all of them here."""

    def __init__(self, held: Held, region: Region | None) -> None:
        super().__init__(held)
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S or s, I] -> [B, S, O]."""
        (made,) = columns(x, self)
        return made


class RowLinear(Linear):
    """x W + b whose rows are split: each rank's share of the products, then g; the bias is added once, to the sum."""

    def __init__(self, held: Held, region: Region | None) -> None:
        super().__init__(held)
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, I] -> [B, S or s, H]."""
        if self.region is None:
            return product(x, self.weight, self.bias)
        made = g(x @ self.weight, self.region)
        return made if self.bias is None else made + self.bias


def columns(x: Tensor, *layers: ColumnLinear) -> tuple[Tensor, ...]:
    """Several column layers of one input, which travels once: x [B, S or s, I] -> each [B, S, O]."""
    region = layers[0].region
    if region is None:
        return tuple(layer(x) for layer in layers) if len(layers) > 1 else (product(x, layers[0].weight, layers[0].bias),)
    return split(x, region, [layer.weight for layer in layers], [layer.bias for layer in layers], transposed=False)


def split(
    x: Tensor, region: Region, weights: list[nn.Parameter], biases: list[nn.Parameter | None], *, transposed: bool
) -> tuple[Tensor, ...]:
    """f(x) W + b for each weight [I, O] (transposed: [O, I]); in backward the input's gradient travels while the weights' are made."""
    made: tuple[Tensor, ...] = _Columns.apply(x, region, transposed, *weights, *biases)  # type: ignore[no-untyped-call]
    return made


class _Columns(torch.autograd.Function):
    """Saves the input as it came, under sequence parallel this rank's run, which backward gathers again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region, transposed: bool, *held: Any) -> tuple[Tensor, ...]:
        weights, biases = held[: len(held) // 2], held[len(held) // 2 :]
        ctx.save_for_backward(x, *weights)
        ctx.region, ctx.transposed, ctx.biased = region, transposed, [bias is not None for bias in biases]
        whole = Gathering(x, region.group).wait() if region.sequence else x
        return tuple(product(whole, weight.mT if transposed else weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        region, rows = ctx.region, [grad.flatten(0, -2) for grad in grads]  # [B S, O]
        coming = Gathering(x, region.group) if region.sequence else None
        by_input = sum(row @ (weight if ctx.transposed else weight.mT) for row, weight in zip(rows, weights, strict=True))
        by_input = by_input.view(*grads[0].shape[:-1], -1)  # [B, S, I]: this rank's part
        whole = x if coming is None else coming.wait()
        going = Scattering(by_input, region.group) if region.sequence else _Summing(by_input, region.group)
        inputs = whole.flatten(0, -2)  # [B S, I]
        by_weights = [row.mT @ inputs if ctx.transposed else inputs.mT @ row for row in rows]
        by_biases = [row.sum(0) if biased else None for row, biased in zip(rows, ctx.biased, strict=True)]
        return going.wait(), None, None, *by_weights, *by_biases


class _Summing:
    """An all-reduce of a contiguous tensor under way."""

    def __init__(self, x: Tensor, group: Group) -> None:
        self.x = x
        self.work = dist.all_reduce(x, group=group.handle, async_op=True)

    def wait(self) -> Tensor:
        self.work.wait()
        return self.x


class VocabEmbedding(nn.Module):
    """A table of vectors whose rows are split: each rank looks up those that it has, then g. `region` None: all of them here."""

    def __init__(self, held: Held, region: Region | None = None) -> None:
        super().__init__()
        self.weight = held["weight"]
        self.region = region

    def forward(self, indices: Tensor) -> Tensor:
        """Of indices [B, S] the rows [B, S or s, H]."""
        if self.region is None:
            return F.embedding(indices, self.weight)
        first = self.region.group.rank * self.weight.shape[0]
        rows: Tensor = _Lookup.apply(indices, self.weight, first)  # type: ignore[no-untyped-call]
        return g(rows, self.region)


class _Lookup(torch.autograd.Function):
    """Rows first, first + 1, ... of a table; 0 for an index that is elsewhere. Saves the indices alone."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, first: int) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.first, ctx.rows = first, weight.shape[0]
        here, elsewhere = _here(indices, first, weight.shape[0])
        return F.embedding(here, weight).masked_fill_(elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (indices,) = ctx.saved_tensors
        here, elsewhere = _here(indices, ctx.first, ctx.rows)
        given = grad.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        by_rows: Tensor = torch.ops.aten.embedding_dense_backward(given, here, ctx.rows, -1, False)
        return None, by_rows, None


def _here(indices: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Indices counted from `first`, 0 where they are not among so many rows; and where that is."""
    local = indices - first
    elsewhere = (local < 0) | (local >= rows)
    return local.masked_fill_(elsewhere, 0), elsewhere
