"""Messages of a group of ranks that split a layer: an all-reduce in place, and messages that travel while a rank computes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .rank_group import Group

# B batch, S sequence, T ranks of the group, s = S / T


def all_reduce(x: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """All-reduce x, contiguous, in place."""
    dist.all_reduce(x, op=op, group=group.handle)
    return x


def _is_async() -> bool:
    return not torch.compiler.is_compiling()


def _under_way(work: Any) -> Any:
    """Return a message under way; None in a compiled graph, where it is done, and where torch 2.11 and 2.12 return its tensor."""
    return work if _is_async() else None


class AsyncAllGather:
    """An all-gather, under way, of each rank's part of the sequence [B, s, ...]; wait() returns [B, S, ...].

    A compiled graph holds no message under way, so that there it is done at once; so are the others.
    """

    def __init__(self, x: Tensor, group: Group) -> None:
        self.ranks, self.own = group.size, x.contiguous()
        self.received = x.new_empty((group.size * x.shape[0], *x.shape[1:]))  # [T B, s, ...]
        self.work = _under_way(dist.all_gather_into_tensor(self.received, self.own, group=group.handle, async_op=_is_async()))

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return torch.unflatten(self.received, 0, (self.ranks, -1)).transpose(0, 1).flatten(1, 2)


class AsyncReduceScatter:
    """A reduce-scatter of [B, S, ...] under way; wait() returns this rank's part of the sum, [B, s, ...]."""

    def __init__(self, x: Tensor, group: Group) -> None:
        self.sent = torch.unflatten(x, 1, (group.size, -1)).transpose(0, 1).contiguous()  # [T, B, s, ...]
        self.received = torch.empty_like(self.sent[0])
        self.work = _under_way(dist.reduce_scatter_tensor(self.received, self.sent.flatten(0, 1), group=group.handle, async_op=_is_async()))

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.received


class AsyncAllReduce:
    """An all-reduce of a contiguous tensor, in place, under way."""

    def __init__(self, x: Tensor, group: Group) -> None:
        self.x = x
        self.work = _under_way(dist.all_reduce(x, group=group.handle, async_op=_is_async()))

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.x
