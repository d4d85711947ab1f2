"""How whole matrices come to the rank that orthogonalises them, and their updates back to the ranks that step them.

A rank has a block of each matrix (tensor parallelism), and steps all of it or, with ZeRO, the elements of its shard. On the data axis
parts go to the matrix's owner in one all-to-all, then blocks on the tensor axis in another; the same two, reversed, bring updates back.
Where each data-parallel rank steps whole blocks, none is sent, and the owners' updates are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...layers.rank_group import Group
from ...plan.axes.muon_matrices import matrix_order, owner
from ...plan.axes.weight_slices import WeightShard
from .data_parallel.sharded_weights import ShardedWeight
from .data_parallel.weight_buckets import WeightBucket

MatrixBucket = WeightBucket | ShardedWeight
Updates = Mapping[MatrixBucket, Tensor]  # of what this rank steps of each bucket, flat
Step = Callable[[Tensor], Tensor]


class HeldMatrix(NamedTuple):
    """A matrix of which this rank has a block: its weight's shard on every tensor-parallel rank, its number in the weight (that of an
    expert, else 0), its bucket, and its owner's coordinates."""

    shards: tuple[WeightShard, ...]
    expert: int
    bucket: MatrixBucket
    data: int
    tensor: int

    @property
    def key(self) -> tuple[str, int]:
        """The weight's logical name and the matrix's number in it."""
        return self.shards[0].name, self.expert

    @property
    def local(self) -> tuple[int, int]:
        """Rows and columns of the block, with padding."""
        rows, columns = self.shards[0].size[-2:]
        return rows, columns

    @property
    def whole(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.shards[0].matrix

    def part(self, rank: int) -> range:
        """The flat elements of the block that a rank of the data axis steps."""
        elements, stepped = self.local[0] * self.local[1], self.bucket.stepped_part(self.shards[0].name, rank)
        first = self.expert * elements
        start, stop = (min(max(each - first, 0), elements) for each in (stepped.start, stepped.stop))
        return range(start, stop)

    def own_part(self, updates: Updates, rank: int) -> Tensor:
        """What this rank, number `rank` on the data axis, steps of the block: a view of its bucket's updates."""
        name, part = self.shards[0].name, self.part(rank)
        within = self.expert * self.local[0] * self.local[1] + part.start - self.bucket.stepped_part(name, rank).start
        first = self.bucket.place_in_shard(name) + within if part else 0
        return updates[self.bucket][first : first + len(part)]

    def block(self, matrix: Tensor, tensor: int) -> Tensor:
        """The block of a whole matrix [rows, columns] that a tensor-parallel rank has, as a view."""
        (row, column), (rows, columns) = self.shards[tensor].offset[-2:], self.shards[tensor].length[-2:]
        return matrix[row : row + rows, column : column + columns]

    def unpadded(self, block: Tensor, tensor: int) -> Tensor:
        """What is no padding of the block of a tensor-parallel rank, as a view."""
        rows, columns = self.shards[tensor].length[-2:]
        return block[:rows, :columns]

    def gives(self, tensor: int) -> bool:
        """Whether a tensor-parallel rank gives its block: of those with the same one the first does."""
        return self.shards[tensor].copy == 0

    def elements(self, tensor: int) -> int:
        """The elements of a tensor-parallel rank's block, without padding."""
        rows, columns = self.shards[tensor].length[-2:]
        return rows * columns


class MatrixExchange:
    """The matrices of a rank that are dealt to the same ranks: those of experts that data-parallel ranks share out, or all others."""

    def __init__(
        self,
        buckets: Sequence[MatrixBucket],
        shards: Sequence[Mapping[str, WeightShard]],
        sharing: Group | None,
        copies: Group | None,
        tensor: Group | None,
    ) -> None:
        """`shards` has each weight's shard, by its name in the table's order, on every tensor-parallel rank. ZeRO shards over the ranks of
        `sharing`; without it those of `copies` step the same."""
        self._sharing, self._copies, self._tensor = sharing, copies if sharing is None else None, tensor
        data = self._sharing or self._copies
        self._at, ranks = (data.rank, data.size) if data else (0, 1)
        self._place = tensor.rank if tensor else 0
        bucket_of = {row.name: bucket for bucket in buckets for row in bucket.rows}
        order = matrix_order([each for name, each in shards[self._place].items() if name in bucket_of])
        held = [
            HeldMatrix(
                tuple(rank[each.shard.name] for rank in shards),
                each.expert,
                bucket_of[each.shard.name],
                *owner(number, ranks, len(shards)),
            )
            for number, each in enumerate(order)
        ]
        self._dealt = [[each for each in held if each.data == rank] for rank in range(ranks)]
        mine = self._dealt[self._at]
        self._mine = mine
        self._owned = [[each for each in mine if each.tensor == rank] for rank in range(len(shards))]  # by tensor-parallel rank

    def orthogonalise(self, updates: Updates, step: Step, dtype: torch.dtype) -> None:
        """Replace updates by what `step` makes of each whole matrix [rows, columns] of this type."""
        empty = next(iter(updates.values())).new_empty(0, dtype=dtype)
        if self._sharing is self._copies is self._tensor is None:
            for each in self._mine:
                block = each.own_part(updates, 0).view(each.local)
                block.copy_(step(block.to(dtype)))
            return
        blocks = self._blocks(updates, empty)
        if self._tensor is None:
            made = [step(blocks.pop(0)) for _ in range(len(blocks))]
        else:
            made = self._step_whole(blocks, step, empty, self._tensor) if blocks else []
        self._return(updates, made, empty)

    def _blocks(self, updates: Updates, empty: Tensor) -> list[Tensor]:
        """Return the blocks of the matrices that are dealt to this rank of the data axis."""
        if self._sharing is None:
            return [each.own_part(updates, 0).to(empty.dtype).view(each.local) for each in self._mine]
        sent = [[each.own_part(updates, self._at) for each in some] for some in self._dealt]
        parts = [[each.part(rank) for each in self._mine] for rank in range(self._sharing.size)]
        received = _all_to_all(sent, [sum(map(len, some)) for some in parts], empty, self._sharing)
        blocks = [received.new_empty(each.local) for each in self._mine]
        places = [(block.view(-1), part) for some in parts for block, part in zip(blocks, some, strict=True)]
        _fill([flat[part.start : part.stop] for flat, part in places], received)
        return blocks

    def _step_whole(self, blocks: list[Tensor], step: Step, empty: Tensor, tensor: Group) -> list[Tensor]:
        """Return the updates of blocks, of which each tensor-parallel rank has another, in their place; padding stays, which is zero."""
        place, ranks, owned = self._place, range(tensor.size), self._owned[self._place]
        of = {each.key: block for each, block in zip(self._mine, blocks, strict=True)}
        sent = [[each.unpadded(of[each.key], place) for each in some if each.gives(place)] for some in self._owned]
        taken = [[each for each in owned if each.gives(rank)] for rank in ranks]
        received = _all_to_all(sent, [sum(each.elements(rank) for each in taken[rank]) for rank in ranks], empty, tensor)
        whole = {each.key: received.new_empty(each.whole) for each in owned}
        _fill([each.block(whole[each.key], rank) for rank in ranks for each in taken[rank]], received)
        made = [step(whole.pop(each.key)) for each in owned]
        back = [[each.block(matrix, rank) for each, matrix in zip(owned, made, strict=True)] for rank in ranks]
        received = _all_to_all(back, [sum(each.elements(place) for each in some) for some in self._owned], empty, tensor)
        _fill([each.unpadded(of[each.key], place) for some in self._owned for each in some], received)
        return blocks

    def _return(self, updates: Updates, made: list[Tensor], empty: Tensor) -> None:
        """Give each rank of the data axis the updates of what it steps."""
        if self._sharing is not None:
            ranks = range(self._sharing.size)
            parts = [[(each.part(rank), block) for each, block in zip(self._mine, made, strict=True)] for rank in ranks]
            back = [[block.reshape(-1)[part.start : part.stop] for part, block in some] for some in parts]
            own = [each.own_part(updates, self._at) for some in self._dealt for each in some]
            lengths = [sum(len(each.part(self._at)) for each in some) for some in self._dealt]
            _fill(own, _all_to_all(back, lengths, empty, self._sharing))
        elif self._copies is not None:
            sizes = [sum(each.local[0] * each.local[1] for each in some) for some in self._dealt]
            flat = empty.new_zeros(max(sizes))
            torch.cat([empty, *(block.reshape(-1) for block in made)], out=flat[: sizes[self._at]])
            made.clear()
            gathered = flat.new_empty(len(sizes), max(sizes))
            dist.all_gather_into_tensor(gathered.view(-1), flat, group=self._copies.handle)
            for row, some in zip(gathered, self._dealt, strict=True):
                _fill([each.own_part(updates, 0) for each in some], row)
        else:
            for each, block in zip(self._mine, made, strict=True):
                each.own_part(updates, 0).view(each.local).copy_(block)


def _all_to_all(sent: Sequence[Sequence[Tensor]], lengths: Sequence[int], empty: Tensor, group: Group) -> Tensor:
    """Send tensors to each rank of a group, flat, in the type and on the device of `empty`; return what the ranks send here, which has
    these lengths."""
    splits = [sum(each.numel() for each in some) for some in sent]
    flat = torch.cat([empty, *(each.reshape(-1).to(empty.dtype) for some in sent for each in some)])
    received = flat.new_empty(sum(lengths))
    dist.all_to_all_single(received, flat, list(lengths), splits, group=group.handle)
    return received


def _fill(places: Sequence[Tensor], flat: Tensor) -> None:
    """Write a flat tensor's elements to places, one after another."""
    at = 0
    for place in places:
        place.copy_(flat[at : at + place.numel()].view(place.shape))
        at += place.numel()
