"""Context parallelism: each rank of a group has two pieces of every sequence, and keys and values of the whole are gathered for
attention (arXiv:2407.21783 section 3.3.2).

Of C ranks, rank r has pieces r and 2C - 1 - r of 2C: one from the front, which sees little of what precedes it, and one from the
back, which sees much, so that causal work is even.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .group import Group

# B batch, S sequence, C ranks of the group, s = S / C of it on one rank, A heads, N key and value heads, D head_dim

Kept = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Context:
    """The context axis as layers see it."""

    group: Group

    def pieces(self, seq: int) -> Iterator[tuple[slice, range]]:
        """Where each of this rank's two pieces of a sequence is among its own tokens, and its positions in the sequence."""
        length, rank, ranks = seq // (2 * self.group.size), self.group.rank, self.group.size
        for own, piece in enumerate((rank, 2 * ranks - 1 - rank)):
            yield slice(own * length, (own + 1) * length), range(piece * length, (piece + 1) * length)

    def positions(self, seq: int, device: torch.device) -> Tensor:
        """The positions [s] of this rank's tokens, in the order in which it has them."""
        return torch.cat([torch.arange(span.start, span.stop, device=device) for _, span in self.pieces(seq)])

    def own(self, x: Tensor) -> Tensor:
        """Of x [B, S] what this rank has, [B, s]."""
        return torch.cat([x[:, span.start : span.stop] for _, span in self.pieces(x.shape[1])], dim=1)

    def gathered(self, key: Tensor, value: Tensor) -> Tensor:
        """Keys and values of the whole sequence in its order: each [B, N, s, D] -> [2, B, N, S, D]. One message."""
        own = torch.stack((key, value))  # [2, B, N, s, D]
        coming = own.new_empty((self.group.size * 2, *key.shape))
        dist.all_gather_into_tensor(coming, own, group=self.group.handle)
        whole = own.new_empty((*own.shape[:3], self.group.size * own.shape[3], own.shape[4]))
        for one, other in self._paired(whole, coming.view(self.group.size, *own.shape)):
            one.copy_(other)
        return whole

    def scattered(self, by_key: Tensor, by_value: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of this rank's keys and values, each [B, N, s, D], from what each rank has of all: [B, N, S, D]. One message."""
        whole = torch.stack((by_key, by_value))
        own = whole.new_empty((*whole.shape[:3], whole.shape[3] // self.group.size, whole.shape[4]))
        going = own.new_empty((self.group.size, *own.shape))
        for one, other in self._paired(whole, going):
            other.copy_(one)
        dist.reduce_scatter_tensor(own, going.flatten(0, 1), group=self.group.handle)
        return own[0], own[1]

    def _paired(self, whole: Tensor, dealt: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of the same piece of [2, B, N, S, D] and of [C, 2, B, N, s, D], which is by ranks."""
        pieces = whole.chunk(2 * self.group.size, dim=3)
        for rank, held in enumerate(dealt):
            front, back = held.chunk(2, dim=3)
            yield pieces[rank], front
            yield pieces[-1 - rank], back


class Core(Protocol):
    """Some way to weigh the values of the whole sequence by the scores of this rank's queries, and back."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Kept]:
        """(values [B, s, A, D], what backward needs) of query [B, A, s, D], key and value [B, N, S, D], mask [B, 1, s, S]."""
        ...

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kept: Kept) -> tuple[Tensor, ...]:
        """Gradients of query, key and value, from that of the values [B, s, A, D]."""
        ...


def attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, core: Core, context: Context, *, again: bool) -> Tensor:
    """Values [B, s, A, D] for this rank's queries [B, A, s, D], from all ranks' keys and values, of which each has [B, N, s, D].

    Only this rank's own are kept, and backward gathers the others' again. `again`: what the core keeps is made again, too.
    """
    values: Tensor = _Attended.apply(query, key, value, mask, core, context, again)  # type: ignore[no-untyped-call]
    return values


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, core: Core, context: Context, again: bool
    ) -> Tensor:
        keys, values = context.gathered(key, value)
        made, kept = core.forward(query, keys, values, mask)
        ctx.save_for_backward(query, key, value, mask, *(() if again else kept))
        ctx.core, ctx.context, ctx.again = core, context, again
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, *kept = ctx.saved_tensors
        keys, values = ctx.context.gathered(key, value)
        if ctx.again:
            _, kept = ctx.core.forward(query, keys, values, mask)
        by_query, by_keys, by_values = ctx.core.backward(grad, query, keys, values, mask, tuple(kept))
        return by_query, *ctx.context.scattered(by_keys, by_values), None, None, None, None
