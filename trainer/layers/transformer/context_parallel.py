"""Context parallelism: each rank of a group has two chunks of every sequence, and attention gathers the keys and values of the whole
sequence (arXiv:2407.21783 section 3.3.2), or exchanges tokens for heads (head_exchange.py).

Of C ranks, rank r has chunks r and 2C - 1 - r of 2C. Causal attention gives an early chunk few keys and a late chunk many, so that
each rank computes the same amount.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..rank_group import Group

# B batch, S sequence, C ranks of the group, s = S / C, A heads, N key and value heads, D head_dim, which values may have another of

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """The context-parallel group as layers see it. `exchanges_heads`: in attention a rank has all tokens of some heads, not all keys and
    some queries of all heads."""

    group: Group
    exchanges_heads: bool = False

    def chunks(self, seq: int) -> Iterator[tuple[slice, range]]:
        """Yield, for each of this rank's two chunks, its place among this rank's tokens and its positions in the sequence."""
        length, rank, ranks = seq // (2 * self.group.size), self.group.rank, self.group.size
        for index, chunk in enumerate((rank, 2 * ranks - 1 - rank)):
            yield slice(index * length, (index + 1) * length), range(chunk * length, (chunk + 1) * length)

    def positions(self, seq: int, device: torch.device) -> Tensor:
        """Return the positions [s] of this rank's tokens, in the order in which it has them."""
        return torch.cat([torch.arange(span.start, span.stop, device=device) for _, span in self.chunks(seq)])

    def shard(self, x: Tensor) -> Tensor:
        """Return this rank's part [B, s] of x [B, S]."""
        return torch.cat([x[:, span.start : span.stop] for _, span in self.chunks(x.shape[1])], dim=1)

    def gather(self, x: Tensor) -> Tensor:
        """All-gather x [B, s, ...], without gradients, into the sequence's order: [B, S, ...]."""
        parts = x.new_empty((self.group.size, *x.shape))
        dist.all_gather_into_tensor(parts.flatten(0, 1), x.contiguous(), group=self.group.handle)
        halves = [part.chunk(2, dim=1) for part in parts]
        return torch.cat([*(front for front, _ in halves), *(back for _, back in reversed(halves))], dim=1)

    def gather_keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All-gather keys and values, each [B, N, s, D], into the sequence's order: each [B, N, S, D]. One message."""
        own = key.new_empty(key.numel() + value.numel())
        for flat, part in zip(_flat_views(own, key.shape, value.shape), (key, value), strict=True):
            flat.copy_(part)
        received = own.new_empty(self.group.size, len(own))
        dist.all_gather_into_tensor(received.flatten(), own, group=self.group.handle)
        keys, values = (each.new_empty(*each.shape[:2], self.group.size * each.shape[2], each.shape[3]) for each in (key, value))
        for in_sequence, by_rank in self._chunk_views((keys, values), received):
            in_sequence.copy_(by_rank)
        return keys, values

    def reduce_scatter_gradients(self, key_grad: Tensor, value_grad: Tensor) -> tuple[Tensor, Tensor]:
        """Reduce-scatter each rank's gradients of all keys and values, each [B, N, S, D], to this rank's [B, N, s, D]. One message."""
        sent = key_grad.new_empty(self.group.size, (key_grad.numel() + value_grad.numel()) // self.group.size)
        for in_sequence, by_rank in self._chunk_views((key_grad, value_grad), sent):
            by_rank.copy_(in_sequence)
        own = torch.empty_like(sent[0])
        dist.reduce_scatter_tensor(own, sent.flatten(), group=self.group.handle)
        key_part, value_part = _flat_views(own, *map(self._part_shape, (key_grad, value_grad)))
        return key_part, value_part

    def _chunk_views(self, wholes: Tensors, by_rank: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of each chunk in `wholes`, each [B, N, S, D], and in the flat parts of them that ranks have, `by_rank` [C, ...]."""
        shapes = [self._part_shape(whole) for whole in wholes]
        for rank, flat in enumerate(by_rank):
            for whole, own in zip(wholes, _flat_views(flat, *shapes), strict=True):
                chunks, (front, back) = whole.chunk(2 * self.group.size, dim=2), own.chunk(2, dim=2)
                yield chunks[rank], front
                yield chunks[-1 - rank], back

    def _part_shape(self, whole: Tensor) -> Sequence[int]:
        """Return the shape [B, N, s, D] of a rank's part of a tensor [B, N, S, D]."""
        return *whole.shape[:2], whole.shape[2] // self.group.size, whole.shape[3]


def _flat_views(flat: Tensor, *shapes: Sequence[int]) -> Tensors:
    """Return views of the tensors of these shapes that lie behind each other in a flat one."""
    return tuple(part.view(shape) for part, shape in zip(torch.split(flat, [prod(shape) for shape in shapes]), shapes, strict=True))


class AttentionCore(Protocol):
    """A way to weight the values of the whole sequence by the scores of this rank's queries, with a backward of its own."""

    saves: bool  # whether its backward reads anything that its forward computed

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensors]:
        """Return (values [B, s, A, D], tensors to save) for query [B, A, s, D], key and value [B, N, S, D], mask [B, 1, s, S]."""
        ...

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, saved: Tensors) -> Tensors:
        """Return the gradients of query, key and value, from the gradient of the values [B, s, A, D]."""
        ...


def context_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, core: AttentionCore, cp: ContextParallel, *, recompute: bool
) -> Tensor:
    """Return values [B, s, A, D] for this rank's queries [B, A, s, D], from the keys and values [B, N, s, D] of all ranks.

    Only this rank's keys and values are saved; backward gathers the others again. `recompute`: backward also computes the tensors
    that the core saves again.
    """
    values: Tensor = _ContextAttention.apply(query, key, value, mask, core, cp, recompute)  # type: ignore[no-untyped-call]
    return values


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, core: AttentionCore, cp: ContextParallel, recompute: bool
    ) -> Tensor:
        all_keys, all_values = cp.gather_keys_and_values(key, value)
        values, saved = core.forward(query, all_keys, all_values, mask)
        ctx.save_for_backward(query, key, value, mask, *(() if recompute else saved))
        ctx.core, ctx.cp, ctx.recompute = core, cp, recompute
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, *saved = ctx.saved_tensors
        all_keys, all_values = ctx.cp.gather_keys_and_values(key, value)
        if ctx.recompute and ctx.core.saves:
            _, saved = ctx.core.forward(query, all_keys, all_values, mask)
        query_grad, key_grads, value_grads = ctx.core.backward(grad, query, all_keys, all_values, mask, tuple(saved))
        return query_grad, *ctx.cp.reduce_scatter_gradients(key_grads, value_grads), None, None, None, None
