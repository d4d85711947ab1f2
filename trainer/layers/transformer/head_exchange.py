"""Context parallelism by all-to-all: ranks that have a part of the tokens of all heads exchange them for all tokens of a part of the heads,
attend, and exchange the values back (DeepSpeed-Ulysses, arXiv:2309.14509). Linear attention, whose states follow the sequence, does too."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .context_parallel import ContextParallel, Tensors

# B batch, S sequence, C ranks of the group, s = S / C, A heads, N key and value heads, D head_dim


def exchange_for_heads(query: Tensor, key: Tensor, value: Tensor, cp: ContextParallel) -> Tensors:
    """Return all tokens of this rank's share of the heads, [B, S, A / C or N / C, D], for queries, keys and values [B, s, A or N, D] of all
    heads. One message in forward and one in backward. Of fewer key heads than ranks each rank has the one that its queries share."""
    ranks = cp.group.size
    key, value = (each if each.shape[2] >= ranks else each.repeat_interleave(ranks // each.shape[2], dim=2) for each in (key, value))
    return exchange_parts_for_heads((query, key, value), cp)


def exchange_parts_for_heads(parts: Sequence[Tensor], cp: ContextParallel) -> Tensors:
    """Return all tokens of this rank's share of the heads, [B, S, A / C, D], for parts [B, s, A, D] of all heads, each of which may have
    an A and a D of its own. One message in forward and one in backward."""
    exchanged: Tensors = _ExchangeForHeads.apply(cp, *parts)  # type: ignore[no-untyped-call]
    return exchanged


def exchange_for_tokens(values: Tensor, cp: ContextParallel) -> Tensor:
    """Return the values [B, s, A, D] of all heads for this rank's tokens, from those [B, S, A / C, D] of all tokens for its heads. One
    message in forward and one in backward."""
    exchanged: Tensor = _ExchangeForTokens.apply(cp, values)  # type: ignore[no-untyped-call]
    return exchanged


class _ExchangeForHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cp: ContextParallel, *tensors: Tensor) -> Tensors:
        ctx.cp = cp
        return _to_heads(tensors, cp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_to_tokens(grads, ctx.cp)


class _ExchangeForTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cp: ContextParallel, values: Tensor) -> Tensor:
        ctx.cp = cp
        return _to_tokens((values,), cp)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, _to_heads((grad,), ctx.cp)[0]


def _to_heads(tensors: Sequence[Tensor], cp: ContextParallel) -> Tensors:
    """[B, s, C a, D] each -> [B, S, a, D] each, in the sequence's order."""
    ranks = cp.group.size
    shapes = [(each.shape[0], each.shape[1], each.shape[2] // ranks, each.shape[3]) for each in tensors]  # of what one rank sends another
    sent = _buffer(tensors[0], ranks, shapes)
    for by_rank, each in zip(_columns(sent, shapes), tensors, strict=True):
        by_rank.copy_(torch.unflatten(each, 2, (ranks, -1)).permute(2, 0, 1, 3, 4))
    wholes = tuple(each.new_empty(shape[0], ranks * shape[1], *shape[2:]) for each, shape in zip(tensors, shapes, strict=True))
    for whole, by_rank in zip(wholes, _columns(_all_to_all(sent, cp), shapes), strict=True):
        _copy_to_sequence(by_rank, whole)
    return wholes


def _to_tokens(tensors: Sequence[Tensor], cp: ContextParallel) -> Tensors:
    """[B, S, a, D] each, in the sequence's order -> [B, s, C a, D] each."""
    ranks = cp.group.size
    shapes = [(each.shape[0], each.shape[1] // ranks, *each.shape[2:]) for each in tensors]
    sent = _buffer(tensors[0], ranks, shapes)
    for whole, by_rank in zip(tensors, _columns(sent, shapes), strict=True):
        _copy_to_ranks(whole, by_rank)
    return tuple(by_rank.permute(1, 2, 0, 3, 4).flatten(2, 3) for by_rank in _columns(_all_to_all(sent, cp), shapes))


# Of C ranks, rank r has chunks r and 2C - 1 - r of a sequence's 2C (`ContextParallel.chunks`).


def _copy_to_sequence(by_rank: Tensor, whole: Tensor) -> None:
    """Copy the tokens of each rank [C, B, s, a, D] to their places in the sequence, [B, S, a, D]."""
    front, back = by_rank.chunk(2, dim=2)
    chunks = torch.unflatten(whole, 1, (2 * len(by_rank), -1))
    chunks[:, : len(by_rank)].copy_(front.transpose(0, 1))
    chunks[:, len(by_rank) :].copy_(back.flip(0).transpose(0, 1))


def _copy_to_ranks(whole: Tensor, by_rank: Tensor) -> None:
    """Copy the tokens of the sequence [B, S, a, D] to those of each rank, [C, B, s, a, D]."""
    front, back = by_rank.chunk(2, dim=2)
    chunks = torch.unflatten(whole, 1, (2 * len(by_rank), -1))
    front.copy_(chunks[:, : len(by_rank)].transpose(0, 1))
    back.copy_(chunks[:, len(by_rank) :].flip(1).transpose(0, 1))


def _buffer(like: Tensor, ranks: int, shapes: Sequence[Sequence[int]]) -> Tensor:
    """Return an empty tensor [C, elements] with room for tensors of these shapes from or for each rank."""
    return like.new_empty(ranks, sum(map(prod, shapes)))


def _columns(buffer: Tensor, shapes: Sequence[Sequence[int]]) -> Tensors:
    """Return views [C, ...] of each tensor in a buffer [C, elements]."""
    parts = torch.split(buffer, [prod(shape) for shape in shapes], dim=1)
    return tuple(torch.unflatten(part, 1, list(shape)) for part, shape in zip(parts, shapes, strict=True))


def _all_to_all(sent: Tensor, cp: ContextParallel) -> Tensor:
    """Send row r of `sent` to rank r; return the rows that this rank is sent."""
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=cp.group.handle)
    return received
