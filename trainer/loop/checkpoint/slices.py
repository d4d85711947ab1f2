"""Slices of logical tensors: a block of the whole, or a run of that block's elements taken row by row. They know no layout."""

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
    """Part of a logical tensor: the block of `size` at `offset`, or of that block laid out row by row the elements
    flat[0] <= i < flat[1] (a ZeRO partition). Raises ValueError where that is no part of `shape`.
    """

    name: str  # as the model names it: layers.3.mlp.down.weight
    kind: str  # weight, exp_avg, exp_avg_sq ...
    shape: Sizes  # of the whole
    offset: Sizes
    size: Sizes
    flat: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.kind):
            raise ValueError(f"a kind is a word of small letters, which {self.kind!r} is not")
        if not len(self.shape) == len(self.offset) == len(self.size) or min((*self.offset, *self.size), default=0) < 0:
            raise ValueError(f"{self.name}: {self.size} at {self.offset} is no block of {self.shape}")
        if any(start + length > whole for start, length, whole in zip(self.offset, self.size, self.shape, strict=True)):
            raise ValueError(f"{self.name}: {self.size} at {self.offset} is no block of {self.shape}")
        if self.flat and not 0 <= self.flat[0] <= self.flat[1] <= prod(self.size):
            raise ValueError(f"{self.name}: elements {self.flat} are not in a block of {prod(self.size)}")

    @property
    def span(self) -> tuple[int, int]:
        """Its first element in the flattened block, and the one after its last."""
        return self.flat or (0, prod(self.size))

    @property
    def count(self) -> int:
        """Elements."""
        return self.span[1] - self.span[0]

    @property
    def local(self) -> Sizes:
        """The shape of a tensor that holds it: that of the block, or one dim where it is a flat run."""
        return (self.count,) if self.flat else self.size

    @property
    def key(self) -> str:
        """A name for it inside a file: the tensor's own where it is whole, else `name[0:4,8:16](100:200)`."""
        edges = zip(self.offset, self.size, strict=True)
        block = "" if self.size == self.shape else f"[{','.join(f'{start}:{start + length}' for start, length in edges)}]"
        return f"{self.name}{block}({self.flat[0]}:{self.flat[1]})" if self.flat else f"{self.name}{block}"

    def part(self, start: int, length: int) -> Slice:
        """Of this slice laid out row by row, `length` elements from `start`."""
        first = self.span[0] + start
        return replace(self, flat=(first, first + length))


def whole(name: str, kind: str, shape: Sizes) -> Slice:
    """The slice that is all of a tensor."""
    return Slice(name=name, kind=kind, shape=tuple(shape), offset=(0,) * len(shape), size=tuple(shape))


def block(name: str, kind: str, shape: Sizes, offset: Sizes, size: Sizes) -> Slice:
    """The slice of `size` that begins at `offset`: what a tensor-parallel rank holds."""
    return Slice(name=name, kind=kind, shape=tuple(shape), offset=tuple(offset), size=tuple(size))


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A slice and the tensor that holds it, on any device. Raises ValueError where the shapes differ."""

    slice: Slice
    tensor: Tensor  # of shape slice.local; of a flat run any tensor that has its elements in order

    def __post_init__(self) -> None:
        flat = self.slice.flat is not None and self.tensor.numel() == self.slice.count
        if tuple(self.tensor.shape) != self.slice.local and not flat:
            raise ValueError(f"{self.slice.key} is {self.slice.local}, and its tensor is {tuple(self.tensor.shape)}")


class Box(NamedTuple):
    """A block whose elements lie one after the other in a slice, from its element `at` on; `offset` is in the whole."""

    offset: Sizes
    size: Sizes
    at: int


def boxes(part: Slice) -> Iterator[Box]:
    """A slice as boxes, in order: one for a block, at most 2 x dims - 1 for a flat run."""
    at = 0
    for offset, size in runs(part.size, *part.span):
        yield Box(tuple(a + b for a, b in zip(part.offset, offset, strict=True)), size, at)
        at += prod(size)


def runs(size: Sizes, first: int, last: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Blocks (offset, size) that make up elements first <= i < last of a block: the end of a row, whole rows, the start of one."""
    if first >= last:
        return
    if not size:
        yield (), ()
        return
    inner = size[1:]
    row = prod(inner)
    top, bottom = -(-first // row), last // row  # whole rows are top <= i < bottom
    if bottom < top:  # inside one row
        yield from _in_row(bottom, runs(inner, first - bottom * row, last - bottom * row))
        return
    yield from _in_row(top - 1, runs(inner, first - (top - 1) * row, row) if first < top * row else ())
    if top < bottom:
        yield (top, *(0 for _ in inner)), (bottom - top, *inner)
    yield from _in_row(bottom, runs(inner, 0, last - bottom * row))


def _in_row(row: int, inside: Iterable[tuple[Sizes, Sizes]]) -> Iterator[tuple[Sizes, Sizes]]:
    for offset, size in inside:
        yield (row, *offset), (1, *size)


def fill(target: Tensor, wanted: Slice, source: Tensor, stored: Slice) -> None:
    """Copy into `target`, which is to hold `wanted`, what `source`, which holds `stored`, has of it (both one dim, in order)."""
    if not near(wanted, stored):
        return
    there = list(boxes(stored))
    for mine in boxes(wanted):
        for theirs in there:
            both = _meet(mine, theirs)
            if both is not None:
                _window(target, mine, *both).copy_(_window(source, theirs, *both))


def _window(flat: Tensor, box: Box, offset: Sizes, size: Sizes) -> Tensor:
    """The block of `size` at `offset` (in the whole) as a view into the tensor that holds the box."""
    view = flat[box.at : box.at + prod(box.size)].view(box.size)
    for dim, (start, length) in enumerate(zip(offset, size, strict=True)):
        view = view.narrow(dim, start - box.offset[dim], length)
    return view


def _meet(one: Slice | Box, other: Slice | Box) -> tuple[Sizes, Sizes] | None:
    """The block (offset, size) that two blocks share, None where they share nothing."""
    offset = tuple(map(max, one.offset, other.offset))
    size = tuple(
        min(a + m, b + n) - start for a, m, b, n, start in zip(one.offset, one.size, other.offset, other.size, offset, strict=True)
    )
    return (offset, size) if min(size, default=1) > 0 else None


def near(one: Slice, other: Slice) -> bool:
    """Whether two slices may share an element: a quick look before their boxes are compared."""
    if one.offset == other.offset and one.size == other.size:
        return max(one.span[0], other.span[0]) < min(one.span[1], other.span[1])
    return _meet(one, other) is not None


def fault(slices: Iterable[Slice]) -> str:
    """Why slices of one tensor are not all of it, each element once; "" where they are."""
    parts = list(slices)
    if _overlap([part for part in parts if part.count]):
        return "two of its slices overlap"
    stored, every = sum(part.count for part in parts), prod(parts[0].shape) if parts else 0
    return "" if stored == every and parts else f"{stored} of its {every} elements are there"


def _overlap(parts: list[Slice]) -> bool:
    """Whether any two slices share an element: neighbours in the same block, then boxes wherever two blocks meet."""
    blocks: dict[tuple[Sizes, Sizes], list[Slice]] = defaultdict(list)
    for part in sorted(parts, key=lambda part: part.span):
        blocks[part.offset, part.size].append(part)
    for within in blocks.values():
        if any(one.span[1] > other.span[0] for one, other in pairwise(within)):
            return True
    meeting = ((one, other) for one, other in combinations(blocks.values(), 2) if _meet(one[0], other[0]))
    return any(_share(a, b) for one, other in meeting for a in one for b in other)


def _share(one: Slice, other: Slice) -> bool:
    return any(_meet(a, b) for a in boxes(one) for b in boxes(other))
