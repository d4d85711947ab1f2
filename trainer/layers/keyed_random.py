"""Randomness that is addressed by what it is for, so that every layout draws the same: initial weights and dropout.

A 64-bit state is hashed from names and numbers, and each position's from that by the finalizer of SplitMix64 (Steele et al.
2014, doi:10.1145/2714064.2660195): integer operations, alike on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from math import prod, sqrt

import torch
from torch import Tensor

# B batch, S sequence, E elements of a row

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: SplitMix64's step
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST = 31
_MIX = ((16, 0x21F0AAAD), (15, 0xD35A2D97))  # "lowbias32" of github.com/skeeto/hash-prospector
_CHUNK, _CHUNK_CUDA = 1 << 16, 1 << 24  # positions at a time: their temporaries stay in a core's cache; on a GPU, few kernels


@dataclass(frozen=True, kw_only=True)
class Keys:
    """What the dropout of one micro-batch is keyed by: a state for each of its tokens, whichever rank holds it."""

    states: Tensor  # [B, S] int64


def keys(seed: int, step: int, samples: Tensor, positions: Tensor) -> Keys:
    """The keys of a micro-batch: its sequences' indices [B] in all that the run consumes, its tokens' positions [S]."""
    states = mixed(samples.long() * _signed(_GOLDEN) + word(seed, step))  # [B]
    return Keys(states=mixed(states[:, None] + (positions.long() + 1) * _signed(_GOLDEN)))  # [B, S]


def word(*address: int | str) -> int:
    """A signed 64-bit number for names and numbers."""
    return int.from_bytes(blake2b(repr(address).encode(), digest_size=8).digest(), "little", signed=True)


def mixed(state: Tensor) -> Tensor:
    """SplitMix64's finalizer of every int64: one to one, each bit of it depending on all of `state`'s."""
    for shift, factor in _ROUNDS:
        state = (state ^ _shifted(state, shift, 64)) * _signed(factor)
    return state ^ _shifted(state, _LAST, 64)


def normal(seed: int, name: str, start: int, count: int, device: torch.device | None = None) -> Tensor:
    """Standard normals [count], float32: those at positions start, start + 1, ... of the flattened logical tensor `name`."""
    made = torch.empty(count, device=device)
    chunk = _chunk(device)
    for first in range(0, count, chunk):
        last = min(count, first + chunk)
        made[first:last] = normal_at(seed, name, torch.arange(start + first, start + last, device=device))
    return made


def normal_block(
    seed: int, name: str, shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...], device: torch.device | None = None
) -> Tensor:
    """Standard normals, float32: the block of `size` at `offset` of the logical tensor `name` of `shape`, alike in every layout."""
    if size == shape:
        return normal(seed, name, 0, prod(shape), device).view(shape)
    places = torch.zeros((), dtype=torch.int64, device=device)
    for whole, first, length in zip(shape, offset, size, strict=True):
        places = places[..., None] * whole + torch.arange(first, first + length, device=device)
    drawn = [normal_at(seed, name, each) for each in torch.split(places.flatten(), _chunk(device))]
    return torch.cat(drawn).view(size)


def _chunk(device: torch.device | None) -> int:
    return _CHUNK_CUDA if device is not None and device.type == "cuda" else _CHUNK


def normal_at(seed: int, name: str, positions: Tensor) -> Tensor:
    """Standard normals, float32, at any positions (int64) of the flattened logical tensor `name`, such as a block's.

    The inverse of the normal distribution at an odd multiple of 2^-53: in float64, so that a float32 hides how each device's
    and each vector length's last bits differ.
    """
    hashed = mixed(positions * _signed(_GOLDEN) + word(seed, name))
    uniform = ((hashed >> 10) | 1).double() * 2.0**-53  # in (-1, 1)
    return uniform.erfinv_().mul_(sqrt(2.0)).float()


def dropout(x: Tensor, p: float, rows: Tensor) -> Tensor:
    """x [..., E], each element 0 with probability p, else divided by 1 - p: keyed by its row's state [...] and its place there."""
    return x.masked_fill(dropped(rows, x.shape[-1], p), 0.0) * (1.0 / (1.0 - p))


def dropped(rows: Tensor, elements: int, p: float) -> Tensor:
    """The mask of dropout, bool [..., E], of rows of so many elements by their states [...]: True with probability p.

    32-bit, since it is all of dropout's cost: a row's and an element's word, mixed, the row's other word, mixed again; the top
    bits of a product depend on all bits of its factor, so that the last shift of a finalizer can be left out.
    """
    halves = rows.contiguous().unsqueeze(-1).view(torch.int32)  # [..., 2]
    places = mixed((torch.arange(elements, device=rows.device) + 1) * _signed(_GOLDEN)).unsqueeze(-1).view(torch.int32)  # [E, 2]
    bits = halves[..., :1] ^ places[:, 0]  # [..., E]
    for turn, (shift, factor) in enumerate(_MIX):
        bits.bitwise_xor_(_shifted(bits, shift, 32)).mul_(_signed(factor, 32))
        if turn == 0:
            bits.add_(halves[..., 1:])
    return bits < round(p * 2**32) - 2**31


def _shifted(bits: Tensor, by: int, width: int) -> Tensor:
    """A logical shift to the right: torch's own, of signed numbers, is arithmetic."""
    return (bits >> by) & ((1 << (width - by)) - 1)


def _signed(number: int, width: int = 64) -> int:
    """An unsigned number as the signed one of the same bits."""
    return number - (1 << width) if number >> (width - 1) else number
