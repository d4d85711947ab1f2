"""Where the elements of a rank's weight shards lie in the logical weights that checkpoints store, and which rank saves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...models.families import op_table
from ...models.ops.op_table import model_constants, model_parameters
from ...plan.axes.weight_slices import WeightShard
from ...spec.run import Run
from . import Shard, Slice, block_slice
from .slices import Sizes, boxes, matrices, range_blocks

Read = Callable[[Slice], Tensor]  # returns a slice's elements in order


class FlatBlock(NamedTuple):
    """Where elements lie in a flat range: in the block of `size` that starts at element `at`, the first `length` along each dim."""

    at: int
    size: Sizes
    length: Sizes

    def view(self, flat: Tensor) -> Tensor:
        """Return those elements of the flat range."""
        return flat[self.at : self.at + prod(self.size)].view(self.size)[tuple(map(slice, self.length))]


def logical_slices(shard: WeightShard, kind: str, start: int, length: int) -> Iterator[tuple[Slice, FlatBlock]]:
    """Yield the slices of the logical tensor in elements start <= i < start + length of a rank's row-major shard, without padding.

    They are flat ranges of the shard's block, in order; one of them unless a dim other than the first is padded.
    """
    block = block_slice(shard.name, kind, shard.shape, shard.offset, shard.length)
    size, unpadded = _merge_dims(shard)
    at = 0
    for offset, each in range_blocks(size, start, start + length):
        inside = tuple(min(first + many, last) - first for first, many, last in zip(offset, each, unpadded, strict=True))
        if min(inside) > 0:
            first = sum(index * prod(unpadded[dim + 1 :]) for dim, index in enumerate(offset))
            count = prod(inside)
            yield block if count == block.count else block.part(first, count), FlatBlock(at, each, inside)
        at += prod(each)


def _merge_dims(shard: WeightShard) -> tuple[Sizes, Sizes]:
    """Return (padded size, logical length) with all dims from the last padded one on merged into one, inside which nothing is padded."""
    last = max((dim for dim, (length, size) in enumerate(zip(shard.length, shard.size, strict=True)) if length != size), default=0)
    return (*shard.size[:last], prod(shard.size[last:])), (*shard.length[:last], prod(shard.length[last:]))


def checkpoint_shards(shard: WeightShard, kind: str, start: int, flat: Tensor, *, is_copy: bool = False) -> Iterator[Shard]:
    """Yield a flat range of a rank's shard, from element `start` on, as shards of a checkpoint: views into it."""
    for part, window in logical_slices(shard, kind, start, len(flat)):
        view = window.view(flat)
        yield Shard(slice=part, tensor=view if part.flat else view.view(part.local), is_copy=is_copy)


def read_range(shard: WeightShard, kind: str, start: int, length: int, *, read: Read) -> Tensor:
    """Return elements start <= i < start + length of a rank's shard as a float32 CPU tensor (one dim): what `read` returns, and 0 in
    the padding."""
    flat = torch.zeros(length)
    for part, window in logical_slices(shard, kind, start, length):
        window.view(flat).copy_(read(part).view(window.length))
    return flat


class Sliceable(Protocol):
    """A logical tensor, or what returns any block of one: `it[edges]`, with a slice for each dim."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""

    def __getitem__(self, edges: tuple[slice, ...], /) -> Tensor:
        """Return the block between the edges."""


def slice_values(tensor: Sliceable, part: Slice) -> Tensor:
    """Return a slice's elements in order (one dim) of a logical tensor with any strides; no other element is read, and of experts one
    matrix at a time."""
    values = torch.empty(part.count, dtype=tensor.dtype)
    for box in (each for whole in boxes(part) for each in matrices(whole)):
        edges = tuple(slice(first, first + many) for first, many in zip(box.offset, box.size, strict=True))
        values[box.at : box.at + prod(box.size)].view(box.size).copy_(tensor[edges])
    return values


def weight_shapes(run: Run) -> dict[str, Sizes]:
    """Return the logical shape of every trained weight and every constant of the whole model, by name: a checkpoint holds these."""
    table, every = op_table(run), range(run.model.layer_groups)
    trained = (parameter for parameter in model_parameters(table, every) if not parameter.frozen)
    return {parameter.name: parameter.shape(table.sizes) for parameter in (*trained, *model_constants(table, every))}


def constant_shard(name: str, shape: Sizes, *, copy: int, copies: int) -> WeightShard:
    """Return a constant, whole, as number `copy` of the tensor axis's `copies` ranks has it."""
    zeros = (0,) * len(shape)
    return WeightShard(name=name, shape=shape, offset=zeros, length=shape, size=shape, copy=copy, copies=copies, shared=False)


def is_saved_here(shard: WeightShard, turn: int, *, replica: int = 0, replicas: int = 1) -> bool:
    """Return whether this rank, of all that hold the same block of a weight, saves it: they take turns, weight by weight.

    Such ranks are tensor-parallel ones that hold the same block, and `replicas` of each where every data-parallel rank steps everything.
    """
    return turn % (replicas * shard.copies) == replica * shard.copies + shard.copy
