"""Block-wise 8-bit quantization with a dynamic data type (Dettmers et al. 2022, arXiv:2110.02861 sections 1.3 and 2): the elements of a
block are codes of 256 numbers between -1 and 1, without a sign between 0 and 1, times the block's scale.

Here the scale is the element that is largest in absolute value, with its sign: it has the code of 1, so that quantizing what was widened
changes no bit. The paper's scale has no sign, and its lowest number is -0.993.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

DECADES = 7  # powers of ten that the numbers reach down to
SMALLEST_SCALE = 2.0**-100  # blocks with a smaller one are zeros: their smallest numbers would not be normal float32 numbers

# N elements in B blocks of as many elements each


def code_numbers(*, signed: bool) -> list[float]:
    """Return the 256 numbers that codes stand for, ascending: 0, 1, and of each decade below 1 the centres of equal parts of [0.1, 1) of
    it, with twice as many parts as in the decade below it (arXiv:1511.04561 section 3.3)."""
    numbers = [0.0, 1.0]
    for decade in range(DECADES):
        parts, size = 2**decade * (1 if signed else 2), 10.0 ** (decade - DECADES + 1)
        centres = [size * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
        numbers += [*centres, *(-each for each in centres if signed)]
    return sorted(numbers)


class CodeTables(NamedTuple):
    """Tables of the codes on a device: the numbers that they stand for; those from which on the next code is nearest, infinite at the last;
    and of each 65,536 float32 numbers with the same upper 16 bits, by these bits, the code of the lowest: the others have it or the
    next."""

    numbers: Tensor  # [256] float32
    bounds: Tensor  # [256] float32
    lowest: Tensor  # [65536] int32
    signed: bool


@cache
def code_tables(device: torch.device, *, signed: bool) -> CodeTables:
    """Return the tables of codes with or without a sign. Without one a number above 0 does not have the code of 0: the root of a second
    moment is a divisor."""
    numbers = code_numbers(signed=signed)
    bounds = torch.tensor([*((low + high) / 2 for low, high in pairwise(numbers)), inf])
    if not signed:
        bounds[0] = torch.finfo(torch.float32).tiny
    upper = torch.arange(2**16, dtype=torch.int32)
    lowest = (upper << 16) | torch.where(upper < 2**15, 0, 2**16 - 1).int()  # of negative numbers the one with all lower bits
    codes = torch.bucketize(lowest.view(torch.float32).nan_to_num(nan=0.0), bounds[:-1], out_int32=True, right=True)
    return CodeTables(torch.tensor(numbers, device=device), bounds.to(device), codes.to(device), signed)


def nearest_codes(numbers: Tensor, tables: CodeTables) -> Tensor:
    """Return the codes of float32 numbers between -1 and 1, int32. A search in the bounds finds them too, and takes 15 times as long on a
    CPU."""
    codes = tables.lowest.index_select(0, (numbers.view(torch.int32) >> 16) & 0xFFFF)
    return codes.add_(numbers >= tables.bounds.index_select(0, codes))


def widen_blocks(codes: Tensor, scales: Tensor, tables: CodeTables) -> Tensor:
    """Return the float32 numbers of codes, uint8 [N] or [B, N / B], with scales [B], in the shape of the codes."""
    rows = _in_blocks(codes, len(scales))
    numbers = tables.numbers.index_select(0, rows.int().view(-1))
    return numbers.view(rows.shape).mul_(scales.unsqueeze(-1)).view(codes.shape)


def quantize_blocks(values: Tensor, blocks: int, tables: CodeTables) -> tuple[Tensor, Tensor]:
    """Return codes, int32, in the shape of `values`, and scales [B] of float32 numbers [N] or [B, N / B] in so many blocks."""
    rows = _in_blocks(values, blocks)
    scales = rows.amax(-1)
    if tables.signed:
        lowest = rows.amin(-1)
        scales = torch.where(scales >= -lowest, scales, lowest)
    scales = torch.where(scales.abs() < SMALLEST_SCALE, 0.0, scales)
    shares = rows / torch.where(scales == 0, 1.0, scales).unsqueeze(-1)
    return nearest_codes(shares.view(-1), tables).view(values.shape), scales


def _in_blocks(tensor: Tensor, blocks: int) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.view(blocks, -1)


def round_in_blocks(values: Tensor, block: int, tables: CodeTables) -> Tensor:
    """Return float32 numbers of any shape as their codes keep them, in blocks of `block` elements and one of the rest."""
    flat = values.reshape(-1)
    whole = len(flat) // block * block
    found = [torch.empty(0, device=values.device)]
    for part, blocks in ((flat[:whole], whole // block), (flat[whole:], 1)):
        if len(part):
            codes, scales = quantize_blocks(part, blocks, tables)
            found.append(widen_blocks(codes, scales, tables))
    return torch.cat(found).view(values.shape)
