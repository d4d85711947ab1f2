"""What a rank holds, as slices of the logical weights that checkpoints know: what a run of elements is of them, and who saves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..models.families import FAMILIES
from ..models.table import named
from ..plan.weight_slices import Placed
from ..spec.run import Run
from .checkpoint import Shard, Slice, block
from .checkpoint.slices import Sizes, boxes, runs

Read = Callable[[Slice], Tensor]  # a slice's elements in order


class Window(NamedTuple):
    """Where elements lie in a flat run: in the block of `size` from its element `at` on, the first `length` along each dim."""

    at: int
    size: Sizes
    length: Sizes

    def of(self, run: Tensor) -> Tensor:
        """Those elements as a view into the run."""
        return run[self.at : self.at + prod(self.size)].view(self.size)[tuple(map(slice, self.length))]


def logical(placed: Placed, kind: str, start: int, length: int) -> Iterator[tuple[Slice, Window]]:
    """What `length` elements from `start` of a rank's tensor, laid out row by row, are of the logical one, without padding.

    They are runs of the rank's block, in order: one of them unless a dim but the first is padded.
    """
    held = block(placed.name, kind, placed.shape, placed.offset, placed.length)
    size, corner = _merged(placed)
    at = 0
    for offset, each in runs(size, start, start + length):
        inside = tuple(min(first + many, last) - first for first, many, last in zip(offset, each, corner, strict=True))
        if min(inside) > 0:
            first = sum(place * prod(corner[dim + 1 :]) for dim, place in enumerate(offset))
            count = prod(inside)
            yield held if count == held.count else held.part(first, count), Window(at, each, inside)
        at += prod(each)


def _merged(placed: Placed) -> tuple[Sizes, Sizes]:
    """(size, length) with every dim from the last padded one on taken as one: there, what is logical is without gaps."""
    last = max((dim for dim, (length, size) in enumerate(zip(placed.length, placed.size, strict=True)) if length != size), default=0)
    return (*placed.size[:last], prod(placed.size[last:])), (*placed.length[:last], prod(placed.length[last:]))


def shards(placed: Placed, kind: str, start: int, run: Tensor) -> Iterator[Shard]:
    """What a run (one dim) from element `start` of a rank's tensor is to a checkpoint, as views into it."""
    for part, window in logical(placed, kind, start, len(run)):
        view = window.of(run)
        yield Shard(slice=part, tensor=view if part.flat else view.view(part.local))


def fill_run(target: Tensor, placed: Placed, kind: str, start: int, length: int, read: Read) -> None:
    """Fill `target` (one dim) with what `length` elements from `start` of a rank's tensor are to be: what is read, and 0 in the padding."""
    target.zero_()
    for part, window in logical(placed, kind, start, length):
        window.of(target).copy_(read(part).view(window.length))


def run_of(placed: Placed, kind: str, start: int, length: int, *, read: Read) -> Tensor:
    """`fill_run` of a new float32 tensor on the CPU."""
    run = torch.empty(length)
    fill_run(run, placed, kind, start, length, read)
    return run


def taken(tensor: Tensor, part: Slice) -> Tensor:
    """A slice of a logical tensor that lies in memory in any order, its elements in their own (one dim): no other is touched."""
    found = torch.empty(part.count, dtype=tensor.dtype)
    for box in boxes(part):
        edges = tuple(slice(first, first + many) for first, many in zip(box.offset, box.size, strict=True))
        found[box.at : box.at + prod(box.size)].view(box.size).copy_(tensor[edges])
    return found


def whole_model(run: Run) -> dict[str, Sizes]:
    """The logical shape of every weight of a run's model by name, whatever this rank holds of it."""
    table = FAMILIES[run.model.family](run.model, run.train)
    return {parameter.name: parameter.shape(table.sizes) for parameter in named(table, range(run.model.layers))}


def saves(placed: Placed, turn: int, *, replica: int = 0, replicas: int = 1) -> bool:
    """Whether this rank, of all that hold the same block of a weight, saves it: they take turns by weight.

    Those are tensor ranks that hold it whole or share it, and `replicas` of each of them where every data rank steps everything.
    """
    return turn % (replicas * placed.copies) == replica * placed.copies + placed.copy
