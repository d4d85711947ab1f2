"""Counter-based random numbers for initial weights and dropout: each is a hash of a seed, a name and a position, so that every layout
draws the same.

Names and numbers are hashed to a 64-bit state; the finalizer of SplitMix64 (Steele et al. 2014, doi:10.1145/2714064.2660195) mixes a
position into it. These are integer operations, the same on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from math import prod, sqrt

import torch
from torch import Tensor

# B batch, S sequence, E elements of a row

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, odd, as a signed number: SplitMix64's step
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST = 31
_MIX = ((16, 0x21F0AAAD), (15, 0xD35A2D97))  # "lowbias32" of github.com/skeeto/hash-prospector
_LAST_MIX = 15
_CHUNK, _CHUNK_CUDA = 1 << 16, 1 << 24  # positions at a time: on a CPU temporaries that fit a core's cache; on a GPU few kernels


@dataclass(frozen=True, kw_only=True)
class DropoutKeys:
    """The dropout states of a micro-batch, one per token, the same on whichever rank holds the token."""

    states: Tensor  # [B, S] int64


def dropout_keys(seed: int, step: int, samples: Tensor, positions: Tensor) -> DropoutKeys:
    """Return the dropout keys of a micro-batch, from its sequences' indices [B] among all that the run reads, and its tokens'
    positions [S]."""
    states = splitmix64(samples.long() * GOLDEN + hash64(seed, step))  # [B]
    return DropoutKeys(states=splitmix64(states[:, None] + (positions.long() + 1) * GOLDEN))  # [B, S]


def hash64(*address: int | str) -> int:
    """Return a signed 64-bit hash of names and numbers."""
    return int.from_bytes(blake2b(repr(address).encode(), digest_size=8).digest(), "little", signed=True)


def splitmix64(state: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer to every int64: one to one, each bit of the result depends on all bits of `state`."""
    for shift, factor in _ROUNDS:
        state = (state ^ _shift_right(state, shift, 64)) * _as_signed(factor)
    return state ^ _shift_right(state, _LAST, 64)


def normal(seed: int, name: str, start: int, count: int, device: torch.device | None = None) -> Tensor:
    """Return standard normals [count], float32, at positions start, start + 1, ... of the flattened logical tensor `name`."""
    normals = torch.empty(count, device=device)
    chunk = _chunk(device)
    for first in range(0, count, chunk):
        last = min(count, first + chunk)
        normals[first:last] = normal_at(seed, name, torch.arange(start + first, start + last, device=device))
    return normals


def normal_block(
    seed: int, name: str, shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...], device: torch.device | None = None
) -> Tensor:
    """Return standard normals, float32: the block of `size` at `offset` of the logical tensor `name` of `shape`."""
    if size == shape:
        return normal(seed, name, 0, prod(shape), device).view(shape)
    positions = torch.zeros((), dtype=torch.int64, device=device)
    for whole, first, length in zip(shape, offset, size, strict=True):
        positions = positions[..., None] * whole + torch.arange(first, first + length, device=device)
    parts = [normal_at(seed, name, each) for each in torch.split(positions.flatten(), _chunk(device))]
    return torch.cat(parts).view(size)


def _chunk(device: torch.device | None) -> int:
    return _CHUNK_CUDA if device is not None and device.type == "cuda" else _CHUNK


def normal_at(seed: int, name: str, positions: Tensor) -> Tensor:
    """Return standard normals, float32, at any positions (int64) of the flattened logical tensor `name`.

    Each is the inverse of the normal distribution at an odd multiple of 2^-53. It is computed in float64: devices and vector lengths
    differ in the last bits, and rounding to float32 hides that.
    """
    hashed = splitmix64(positions * GOLDEN + hash64(seed, name))
    uniform = ((hashed >> 10) | 1).double() * 2.0**-53  # in (-1, 1)
    return uniform.erfinv_().mul_(sqrt(2.0)).float()


def dropout(x: Tensor, p: float, rows: Tensor, first: int = 0) -> Tensor:
    """Return x [..., E] with each element 0 with probability p, else divided by 1 - p; keyed by the row's state [...] and the
    element's index in the row, which begins with index `first`."""
    return x.masked_fill(dropout_mask(rows, x.shape[-1], p, first), 0.0) * (1.0 / (1.0 - p))


def dropout_mask(rows: Tensor, elements: int, p: float, first: int = 0) -> Tensor:
    """Return the dropout mask, bool [..., E], of elements first <= i < first + E of rows by their states [...]: True, dropped, with
    probability p.

    Dropout costs little else than this hash, so the hash is 32-bit: a row's first word and an element's word, mixed, plus the row's
    second word, mixed again. The top bits of a product depend on all bits of its factor, so the finalizer's last shift is left out.
    """
    columns = low_word(splitmix64(numbers_from(first + 1, elements, rows.device) * GOLDEN))  # [E]
    states = rows.unsqueeze(-1)
    return _mixed(low_word(states), high_word(states), columns) < round(p * 2**32) - 2**31


def numbers_from(first: int, count: int, device: torch.device) -> Tensor:
    """Return first, first + 1, ... as int64 [count]. torch's compiler would compute products of an arange as it does an index, on a GPU
    in 32 bits, of which a hash's factor has more; those of an or it does not."""
    return torch.arange(first, first + count, device=device).bitwise_or(0)


def low_word(states: Tensor) -> Tensor:
    """Return the low 32 bits of each int64, as int32. A compiled graph of torch 2.11 or 2.12 can't view one of them as two int32."""
    return ((states << 32) >> 32).to(torch.int32)


def high_word(states: Tensor) -> Tensor:
    """Return the high 32 bits of each int64, as int32."""
    return (states >> 32).to(torch.int32)


def mixed_words(first: Tensor, second: Tensor, columns: Tensor) -> Tensor:
    """Return 32 random bits, int32 [R, C], from two words of each row ([R, 1] each) and one of each column [C]; all bits depend on all."""
    bits = _mixed(first, second, columns)
    return bits.bitwise_xor_(_shift_right(bits, _LAST_MIX, 32))


def _mixed(first: Tensor, second: Tensor, columns: Tensor) -> Tensor:
    """Mix two words of each row [..., 1] and one of each column [C] to bits [..., C], of which the top ones depend on all."""
    bits = first ^ columns
    for turn, (shift, factor) in enumerate(_MIX):
        bits.bitwise_xor_(_shift_right(bits, shift, 32)).mul_(_as_signed(factor, 32))
        if turn == 0:
            bits.add_(second)
    return bits


def _shift_right(bits: Tensor, by: int, width: int) -> Tensor:
    """Shift right logically: torch's own shift of signed numbers is arithmetic."""
    return (bits >> by) & ((1 << (width - by)) - 1)


def _as_signed(number: int, width: int = 64) -> int:
    """Return the signed number that has the bits of an unsigned one."""
    return number - (1 << width) if number >> (width - 1) else number
