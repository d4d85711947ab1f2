"""A moment that an optimizer keeps in 8 bits (optim.moments=int8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..layers.block_quantization import CodeTables, code_tables, quantize_blocks, widen_blocks
from ..plan.costs.precision import MOMENT_BLOCK

# N elements of a rank's shard of a bucket, B blocks


class QuantizedMoment(NamedTuple):
    """Codes and the scales of their blocks. The part of a weight that begins at an element of the shard has blocks of its own, of 256
    elements from there on, the last one of fewer; `first_blocks` numbers their first by that element. `signed`: it is no second moment."""

    codes: Tensor  # [N] uint8
    scales: Tensor  # [B] float32
    first_blocks: Mapping[int, int]
    signed: bool

    def widen(self, place: slice, blocks: slice) -> Tensor:
        """Return elements of the shard that are whole blocks of equal length, in float32."""
        return widen_blocks(self.codes[place], self.scales[blocks], self._tables)

    def keep(self, place: slice, blocks: slice, values: Tensor) -> None:
        """Quantize float32 values of such elements."""
        codes, scales = quantize_blocks(values, blocks.stop - blocks.start, self._tables)
        self.codes[place].copy_(codes)
        self.scales[blocks].copy_(scales)

    @property
    def _tables(self) -> CodeTables:
        return code_tables(self.codes.device, signed=self.signed)

    def widen_part(self, offset: int, length: int) -> Tensor:
        """Return the part of a weight that begins at element `offset` of the shard, widened in the host's memory."""
        pieces = [self.widen(*each).cpu() for each in equal_blocks(offset, length, self.first_blocks[offset])]
        return torch.cat(pieces)

    def keep_part(self, offset: int, values: Tensor) -> None:
        """Quantize the part of a weight that begins at element `offset` of the shard."""
        for place, blocks in equal_blocks(offset, len(values), self.first_blocks[offset]):
            here = values[place.start - offset : place.stop - offset]
            self.keep(place, blocks, here.to(self.codes.device, torch.float32))


class EqualBlocks(NamedTuple):
    """Elements of a shard that are whole blocks of equal length, and these blocks."""

    place: slice
    blocks: slice


def equal_blocks(offset: int, length: int, first: int, most: int | None = None) -> list[EqualBlocks]:
    """Return the part of a weight at element `offset` of a shard, whose first block is number `first`: full blocks, at most `most` elements
    of them together, and the last one, where it has fewer elements."""
    whole, rest = divmod(length, MOMENT_BLOCK)
    together = max(1, (most or length) // MOMENT_BLOCK)
    found = []
    for block in range(0, whole, together):
        stop = min(block + together, whole)
        found.append(EqualBlocks(slice(offset + block * MOMENT_BLOCK, offset + stop * MOMENT_BLOCK), slice(first + block, first + stop)))
    if rest:
        found.append(EqualBlocks(slice(offset + whole * MOMENT_BLOCK, offset + length), slice(first + whole, first + whole + 1)))
    return found
