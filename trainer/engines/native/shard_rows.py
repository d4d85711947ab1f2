"""The rows of logical weights of which a rank's shard of a bucket consists, and their random words at a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...layers.stochastic_rounding import row_words, tensor_key
from ...plan.axes.weight_slices import WeightShard
from .data_parallel.weight_buckets import Piece

# B blocks, R rows of them all, D leading dims


class RowBlock(NamedTuple):
    """Neighbouring elements of a shard, from `start` on: whole rows of one weight, or a part of a row.

    `row` numbers the first one among all rows of the shard's blocks; `column` is that of the logical weight.
    """

    start: int
    row: int
    column: int
    rows: int
    columns: int

    @property
    def place(self) -> slice:
        """Its elements in the shard."""
        return slice(self.start, self.start + self.rows * self.columns)


class ShardRows:
    """The rows of a shard. All are hashed at once: a step has few kernels for them, and holds them for a moment alone."""

    def __init__(self, pieces: Iterable[Piece], seed: int, device: torch.device) -> None:
        self._blocks: list[RowBlock] = []
        found: list[tuple[WeightShard, int]] = []  # of each block, and its first row in this rank's tensor of the weight
        for piece in pieces:
            for block, local in _blocks(piece, self.rows):
                self._blocks.append(block)
                found.append((piece.row.shard, local))
        dims = max((len(shard.shape) - 1 for shard, _ in found), default=0)
        self._leading = torch.tensor([_leading_dims(shard, dims) for shard, _ in found], device=device).view(len(found), dims, 3)
        self._keys = torch.tensor([tensor_key(seed, shard.name) for shard, _ in found], dtype=torch.int64, device=device)
        first = [local - block.row for (_, local), block in zip(found, self._blocks, strict=True)]
        self._first = torch.tensor(first, dtype=torch.int64, device=device)
        self._counts = torch.tensor([block.rows for block in self._blocks], dtype=torch.int64, device=device)

    @property
    def rows(self) -> int:
        """How many rows its blocks have."""
        return self._blocks[-1].row + self._blocks[-1].rows if self._blocks else 0

    @property
    def width(self) -> int:
        """The number of columns up to the last one that a block has."""
        return max((each.column + each.columns for each in self._blocks), default=0)

    def words(self, taken: Tensor) -> Tensor:
        """Return the words, int32 [R, 2], of all rows at step number `taken`."""
        device, blocks = self._keys.device, torch.arange(len(self._keys), device=self._keys.device)
        block = torch.repeat_interleave(blocks, self._counts, output_size=self.rows)  # [R]
        left = torch.arange(self.rows, device=device) + self._first[block]
        rows = torch.zeros_like(left)
        for size, offset, inner in reversed(self._leading.permute(1, 2, 0).unbind()):  # each [B]
            of_rows = size[block]
            rows += (left % of_rows + offset[block]) * inner[block]
            left //= of_rows
        return row_words(self._keys[block], taken, rows)

    def cut(self, first: int, stop: int, most: int) -> Iterator[RowBlock]:
        """Yield elements [first, stop) of the shard as blocks of at most `most` elements."""
        for whole in self._blocks:
            at, end = max(first, whole.start), min(stop, whole.place.stop)
            while at < end:
                row, column = divmod(at - whole.start, whole.columns)
                rows = 0 if column else min(end - at, most) // whole.columns
                columns = whole.columns if rows else min(whole.columns - column, end - at, most)
                block = RowBlock(at, whole.row + row, whole.column + column, max(rows, 1), columns)
                yield block
                at = block.place.stop


def _blocks(piece: Piece, row: int) -> Iterator[tuple[RowBlock, int]]:
    """Yield the elements of a piece as the end of a row, whole rows, and the start of a row, of which the first is number `row` of the
    shard, each with its first row in this rank's tensor of the weight."""
    shard, start = piece.row.shard, piece.start
    width, offset = (shard.size[-1], shard.offset[-1]) if shard.size else (1, 0)
    while start < (stop := piece.start + piece.length):
        local, column = divmod(start, width)
        rows = 0 if column else (stop - start) // width
        columns = width if rows else min(width - column, stop - start)
        block = RowBlock(piece.offset + start - piece.start, row, offset + column, max(rows, 1), columns)
        yield block, local
        start, row = start + block.rows * columns, row + block.rows


def _leading_dims(shard: WeightShard, dims: int) -> list[tuple[int, int, int]]:
    """Return (size, offset, logical rows of one step) of each dim of a rank's tensor but the last, with dims of size 1 before them."""
    found, inner = list[tuple[int, int, int]](), 1
    for size, offset, whole in reversed(list(zip(shard.size, shard.offset, shard.shape, strict=True))[:-1]):
        found.insert(0, (size, offset, inner))
        inner *= whole
    return [(1, 0, 0)] * (dims - len(found)) + found
