"""Slices of logical tensors: a block, or a range of a block's elements in row-major order. They are independent of layouts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import prod
from typing import NamedTuple

from torch import Tensor

Sizes = tuple[int, ...]  # elements along each dim


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Part of a logical tensor: the block of `size` at `offset`, or elements flat[0] <= i < flat[1] of that block in row-major order
    (a ZeRO partition). Raises ValueError where that is outside `shape`.
    """

    name: str  # as the model names it: layers.3.mlp.down.weight
    kind: str  # weight, exp_avg, exp_avg_sq ...
    shape: Sizes  # of the logical tensor
    offset: Sizes
    size: Sizes
    flat: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.kind):
            raise ValueError(f"a kind is a lower-case name, which {self.kind!r} is not")
        if not len(self.shape) == len(self.offset) == len(self.size) or min((*self.offset, *self.size), default=0) < 0:
            raise ValueError(f"{self.name}: {self.size} at {self.offset} is not a block of {self.shape}")
        if any(start + length > whole for start, length, whole in zip(self.offset, self.size, self.shape, strict=True)):
            raise ValueError(f"{self.name}: {self.size} at {self.offset} is not a block of {self.shape}")
        if self.flat and not 0 <= self.flat[0] <= self.flat[1] <= prod(self.size):
            raise ValueError(f"{self.name}: elements {self.flat} are not in a block of {prod(self.size)}")

    @property
    def span(self) -> tuple[int, int]:
        """Its first element in the flattened block, and the one after its last."""
        return self.flat or (0, prod(self.size))

    @property
    def count(self) -> int:
        """Its number of elements."""
        return self.span[1] - self.span[0]

    @property
    def local(self) -> Sizes:
        """The shape of a tensor that holds it: that of the block, or one dim for a flat range."""
        return (self.count,) if self.flat else self.size

    @property
    def key(self) -> str:
        """Its name inside a file: the tensor's name if it is all of the tensor, else `name[0:4,8:16](100:200)`."""
        edges = zip(self.offset, self.size, strict=True)
        block = "" if self.size == self.shape else f"[{','.join(f'{start}:{start + length}' for start, length in edges)}]"
        return f"{self.name}{block}({self.flat[0]}:{self.flat[1]})" if self.flat else f"{self.name}{block}"

    def part(self, start: int, length: int) -> Slice:
        """Return `length` elements from `start` of this slice, in row-major order."""
        first = self.span[0] + start
        return replace(self, flat=(first, first + length))


def whole_slice(name: str, kind: str, shape: Sizes) -> Slice:
    """Return the slice that is all of a tensor."""
    return Slice(name=name, kind=kind, shape=tuple(shape), offset=(0,) * len(shape), size=tuple(shape))


def block_slice(name: str, kind: str, shape: Sizes, offset: Sizes, size: Sizes) -> Slice:
    """Return the block of `size` at `offset`, such as a tensor-parallel rank's shard."""
    return Slice(name=name, kind=kind, shape=tuple(shape), offset=tuple(offset), size=tuple(size))


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A slice and the tensor that holds it, on any device. Raises ValueError where the shapes differ. `is_copy`: training does not change
    the tensor, which was made for this save, in the host's memory."""

    slice: Slice
    tensor: Tensor  # of shape slice.local; for a flat range any shape, with the elements in order
    is_copy: bool = False

    def __post_init__(self) -> None:
        flat = self.slice.flat is not None and self.tensor.numel() == self.slice.count
        if tuple(self.tensor.shape) != self.slice.local and not flat:
            raise ValueError(f"{self.slice.key} is {self.slice.local}, and its tensor is {tuple(self.tensor.shape)}")


class Box(NamedTuple):
    """A block whose elements are consecutive in a slice, from element `at` on; `offset` is in the logical tensor."""

    offset: Sizes
    size: Sizes
    at: int


def boxes(part: Slice) -> Iterator[Box]:
    """Yield a slice as boxes, in order: one for a block, at most 2 x dims - 1 for a flat range."""
    at = 0
    for offset, size in range_blocks(part.size, *part.span):
        yield Box(tuple(a + b for a, b in zip(part.offset, offset, strict=True)), size, at)
        at += prod(size)


def matrices(box: Box) -> Iterator[Box]:
    """Yield a box of three dims as boxes of one matrix each, in order, and others as they are."""
    if len(box.size) != 3:
        yield box
        return
    (first, *offset), (many, *size) = box.offset, box.size
    for at in range(many):
        yield Box((first + at, *offset), (1, *size), box.at + at * prod(size))


def range_blocks(size: Sizes, first: int, last: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Yield the blocks (offset, size) of elements first <= i < last of a block: the end of a row, whole rows, the start of a row."""
    if first >= last:
        return
    if not size:
        yield (), ()
        return
    inner = size[1:]
    row = prod(inner)
    top, bottom = -(-first // row), last // row  # whole rows are top <= i < bottom
    if bottom < top:  # all inside one row
        yield from _within_row(bottom, range_blocks(inner, first - bottom * row, last - bottom * row))
        return
    yield from _within_row(top - 1, range_blocks(inner, first - (top - 1) * row, row))
    if top < bottom:
        yield (top, *(0 for _ in inner)), (bottom - top, *inner)
    yield from _within_row(bottom, range_blocks(inner, 0, last - bottom * row))


def _within_row(row: int, inside: Iterable[tuple[Sizes, Sizes]]) -> Iterator[tuple[Sizes, Sizes]]:
    for offset, size in inside:
        yield (row, *offset), (1, *size)


def copy_overlap(target: Tensor, wanted: Slice, source: Tensor, stored: Slice) -> None:
    """Copy the elements that two slices share from `source`, which holds `stored`, to `target`, which holds `wanted` (both one dim)."""
    if not may_overlap(wanted, stored):
        return
    sources = list(boxes(stored))
    for target_box in boxes(wanted):
        for source_box in sources:
            shared = _intersection(target_box, source_box)
            if shared is not None:
                _box_view(target, target_box, *shared).copy_(_box_view(source, source_box, *shared))


def _box_view(flat: Tensor, box: Box, offset: Sizes, size: Sizes) -> Tensor:
    """Return the block of `size` at `offset` (in the logical tensor) as a view of the flat tensor that holds the box."""
    view = flat[box.at : box.at + prod(box.size)].view(box.size)
    for dim, (start, length) in enumerate(zip(offset, size, strict=True)):
        view = view.narrow(dim, start - box.offset[dim], length)
    return view


def _intersection(one: Slice | Box, other: Slice | Box) -> tuple[Sizes, Sizes] | None:
    """Return the block (offset, size) that two blocks share, or None."""
    offset = tuple(map(max, one.offset, other.offset))
    size = tuple(
        min(a + m, b + n) - start for a, m, b, n, start in zip(one.offset, one.size, other.offset, other.size, offset, strict=True)
    )
    return (offset, size) if min(size, default=1) > 0 else None


def may_overlap(one: Slice, other: Slice) -> bool:
    """Return whether two slices may share an element: a cheap test before their boxes are compared."""
    if one.offset == other.offset and one.size == other.size:
        return max(one.span[0], other.span[0]) < min(one.span[1], other.span[1])
    return _intersection(one, other) is not None


def coverage_fault(slices: Iterable[Slice]) -> str:
    """Return why slices of one tensor do not cover each element once; "" where they do."""
    parts = list(slices)
    if _any_overlap([part for part in parts if part.count]):
        return "two of its slices overlap"
    stored, every = sum(part.count for part in parts), prod(parts[0].shape) if parts else 0
    return "" if stored == every and parts else f"{stored} of its {every} elements are there"


def _any_overlap(parts: list[Slice]) -> bool:
    """Return whether any two slices share an element: compare neighbours in the same block, then boxes where two blocks intersect."""
    blocks: dict[tuple[Sizes, Sizes], list[Slice]] = defaultdict(list)
    for part in sorted(parts, key=lambda part: part.span):
        blocks[part.offset, part.size].append(part)
    for within in blocks.values():
        if any(one.span[1] > other.span[0] for one, other in pairwise(within)):
            return True
    meeting = ((one, other) for one, other in combinations(blocks.values(), 2) if _intersection(one[0], other[0]))
    return any(_slices_overlap(a, b) for one, other in meeting for a in one for b in other)


def _slices_overlap(one: Slice, other: Slice) -> bool:
    return any(_intersection(a, b) for a in boxes(one) for b in boxes(other))
