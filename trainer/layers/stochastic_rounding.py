"""Stochastic rounding of float32 to bfloat16, keyed: up or down with probabilities that leave the mean as it is.

The random numbers of an element follow from a seed, the step, its tensor's logical name and its place in it, so that every layout rounds
alike. Of an element's 32 random bits each of two tensors takes 16, as many as bfloat16 lacks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .counter_rng import GOLDEN, hash64, mixed_words, splitmix64

# R rows, C columns

_HALF_BITS = 16  # of a float32, which bfloat16 leaves out
_KEPT = -(1 << _HALF_BITS)  # the mask of the others


def tensor_key(seed: int, name: str) -> int:
    """Return the key of a logical tensor."""
    return hash64(seed, "rounding", name)


def row_words(keys: Tensor | int, step: Tensor, rows: Tensor) -> Tensor:
    """Return the two words, int32 [R, 2], of each of some rows (int64 [R]) at a step, a number on the rows' device. `keys` is that of their
    tensor, or of the tensor of each (int64 [R])."""
    states = splitmix64(step.long() * GOLDEN + keys)
    return splitmix64(states + (rows + 1) * GOLDEN).unsqueeze(-1).view(torch.int32)


def column_words(columns: Tensor) -> Tensor:
    """Return a word, int32 [C], of each of some columns (int64 [C])."""
    return splitmix64((columns + 1) * GOLDEN).unsqueeze(-1).view(torch.int32)[:, 0].contiguous()


def random_words(rows: Tensor, columns: Tensor) -> Tensor:
    """Return 32 random bits, int32 [R, C] or [R, C / W, W], of each element of rows [R, 2] and columns [C] or [C / W, W], given by their
    words."""
    first, second = (rows[:, each].view(-1, *(1 for _ in columns.shape)) for each in (0, 1))
    return mixed_words(first, second, columns)


def round_at_random(values: Tensor, words: Tensor, half: int) -> Tensor:
    """Return finite float32 values [R, C] as bfloat16, with half 0 or 1 of the random bits of `words` [R, C].

    The bits below bfloat16's are a share of the distance to the next number away from zero: with that probability the sum carries into
    bfloat16's bits. A number that bfloat16 has stays.
    """
    noise = (words >> (_HALF_BITS * half)).bitwise_and_(~_KEPT)
    bits = noise.add_(values.view(torch.int32)).bitwise_and_(_KEPT)
    return bits.view(torch.float32).to(torch.bfloat16)
