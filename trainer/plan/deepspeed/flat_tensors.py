"""The flat tensors of DeepSpeed's ZeRO: a rank's parameters end to end, partitioned over the data-parallel ranks.

All layers but the first dense ones are alike, so that positions follow from one layer, in a time that does not grow with their number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

from ...models.ops.op_table import OpTable, Parameter, model_parameters
from ..axes.weight_slices import TensorCopies, weight_shard
from .defaults import ALIGNED

MOST_RANKS, MOST_LAYERS = 4096, 256  # of a stage; beyond both, the rank with most is not computed


class FlatParameter(NamedTuple):
    """One parameter on a rank: elements with padding; whether it decays (what does not lies apart); which other ranks of the tensor
    axis hold it too; whether expert ranks hold other parts of it."""

    elements: int
    decays: bool
    copies: TensorCopies
    expert: bool = False


class StageParameters(NamedTuple):
    """The parameters that a rank holds, in the table's order: those before the layers, those of each layer, those after."""

    before: tuple[FlatParameter, ...]
    layer: tuple[FlatParameter, ...]
    layers: int
    after: tuple[FlatParameter, ...]


class FlatElements(NamedTuple):
    """Elements on a rank. At ZeRO 1 and 2: its part of the flat tensors, the whole flat tensors, and, where one asks for them, all
    parameters that overlap the part of the rank with most. At ZeRO 3, where each parameter is partitioned alone: its part."""

    part: int
    whole: int
    count_overlapping: Callable[[], int]  # it examines ranks one by one
    stage3: int


def stage_parameters(
    table: OpTable, layers: int, *, first: bool, last: bool, tp: int, vocab_multiple: int, ep: int = 1, frozen: bool = False
) -> StageParameters:
    """Return the trained or the frozen parameters that a rank holds of so many layers, the embedding and the dense layers (`first`) and
    the head (`last`)."""

    def rows(parameters: Iterable[Parameter]) -> Iterator[FlatParameter]:
        for parameter in parameters:
            if parameter.frozen is not frozen:
                continue
            shard = weight_shard(parameter, table.sizes, tp, 0, vocab_multiple=vocab_multiple, ep=ep)
            copies: TensorCopies = "" if tp == 1 else "shared" if shard.shared else "" if shard.is_split else "replicated"
            yield FlatParameter(prod(shard.size), shard.decays, copies, shard.expert)

    dense = range(table.dense_layers if first else 0)
    before = tuple(rows(model_parameters(table, dense, first=first, last=False)))
    ends = tuple(rows(model_parameters(table, dense, first=first, last=last)))
    layer = model_parameters(table, range(table.dense_layers, table.dense_layers + 1), first=False, last=False)
    return StageParameters(before, tuple(rows(layer)), layers, ends[len(before) :])


@lru_cache(maxsize=256)
def flat_elements(held: StageParameters, ranks: int, ep: int = 1) -> FlatElements:
    """Return how parameters lie on so many data-parallel ranks; experts lie on every `ep`-th of them, those that hold the same ones."""
    groups = [(group, ep if group.expert else 1) for group in _flat_groups(held)]
    parts = [group.part(ranks // stride) for group, stride in groups]
    return FlatElements(
        part=sum(parts),
        whole=sum(part * (ranks // stride) for part, (_, stride) in zip(parts, groups, strict=True)),
        count_overlapping=cache(
            lambda: _most_on_one_rank(
                [group.overlapping_elements(part, stride) for part, (group, stride) in zip(parts, groups, strict=True)], ranks
            )
        ),
        stage3=_stage3_elements(held, ranks),
    )


@lru_cache(maxsize=256)
def stepped_elements(held: StageParameters, copies: TensorCopies, stage: int, ranks: int, data: int | None, ep: int = 1) -> int:
    """Return how many elements of the parameters with such copies on the tensor axis the data-parallel rank `data` steps; None: the rank
    that steps most. Experts lie on every `ep`-th rank."""
    if stage in (0, 3) or ranks == 1:
        return _stage3_elements(held, 1 if stage == 0 else ranks, copies)
    groups = [(group, ep if group.expert else 1) for group in _flat_groups(held)]
    stepped = [group.stepped_elements(group.part(ranks // stride), copies, stride) for group, stride in groups]
    return _most_on_one_rank(stepped, ranks) if data is None else sum(of_rank(data)[0] for of_rank in stepped)


def _stage3_elements(held: StageParameters, ranks: int, copies: TensorCopies | None = None) -> int:
    """Return the elements of a rank's part where each parameter is partitioned alone; with `copies`, of the parameters with such copies."""

    def parts(rows: Iterable[FlatParameter]) -> int:
        return sum(-(-row.elements // ranks) for row in rows if copies in (None, row.copies))

    return parts(held.before) + held.layers * parts(held.layer) + parts(held.after)


RankElements = Callable[[int], tuple[int, int]]  # rank -> (its elements, the last of the following ranks with as many)


def _most_on_one_rank(groups: Sequence[RankElements], ranks: int) -> int:
    """Return the most elements that a rank has of all flat tensors together."""
    rank = most = 0
    while rank < ranks:
        rows = [of_rank(rank) for of_rank in groups]
        most = max(most, sum([elements for elements, _ in rows]))
        rank = min([last for _, last in rows], default=ranks) + 1
    return most


class FlatGroup:
    """One flat tensor: the parameters of a parameter group that have elements, in order."""

    def __init__(self, held: StageParameters, *, decays: bool, expert: bool) -> None:
        self.expert = expert
        self._blocks = [
            _Block([row for row in rows if row.elements and (row.decays, row.expert) == (decays, expert)], times)
            for rows, times in ((held.before, 1), (held.layer, held.layers), (held.after, 1))
        ]
        self._starts = (0, *accumulate(block.size * block.times for block in self._blocks))
        self.size = self._starts[-1]

    def part(self, ranks: int) -> int:
        """Return the elements of a rank's part."""
        return -(-self.size // (ALIGNED * ranks)) * ALIGNED

    def overlapping_elements(self, part: int, stride: int) -> RankElements:
        """Return the elements, by rank, of the parameters that overlap its part; `stride` neighbouring ranks have the same part."""

        def of_rank(rank: int) -> tuple[int, int]:
            start = rank // stride * part
            if start >= self.size:
                return 0, _NO_RANK
            first, end, _ = self._at(start)
            if end >= start + part:  # the part, as those of the following ranks, lies inside one parameter
                return end - first, end // part * stride - 1
            return self._at(min(start + part, self.size) - 1)[1] - first, (rank // stride + 1) * stride - 1

        return of_rank

    def stepped_elements(self, part: int, copies: TensorCopies, stride: int) -> RankElements:
        """Return the elements, by rank, of its part that belong to parameters with such copies on the tensor axis; `stride` neighbouring
        ranks have the same part."""

        def of_rank(rank: int) -> tuple[int, int]:
            start = rank // stride * part
            if start >= self.size:
                return 0, _NO_RANK
            _, end, row = self._at(start)
            if end >= start + part:
                return part * (row.copies == copies), end // part * stride - 1
            stepped = self._before(min(start + part, self.size), copies) - self._before(start, copies)
            return stepped, (rank // stride + 1) * stride - 1

        return of_rank

    def _at(self, element: int) -> tuple[int, int, FlatParameter]:
        """Return the parameter that holds an element: its first element, its end, itself."""
        at = bisect_right(self._starts, element) - 1
        first, end, row = self._blocks[at].at(element - self._starts[at])
        return self._starts[at] + first, self._starts[at] + end, row

    def _before(self, end: int, copies: TensorCopies) -> int:
        """Return the elements before `end` of parameters with such copies."""
        return sum(
            block.before(min(end - start, block.size * block.times), copies)
            for start, block in zip(self._starts, self._blocks, strict=False)
        )


class _Block:
    """Neighbouring parameters, repeated `times` times."""

    def __init__(self, rows: list[FlatParameter], times: int) -> None:
        self._rows, self.times = rows, times
        self._starts = (0, *accumulate(row.elements for row in rows))
        self.size = self._starts[-1]

    def at(self, element: int) -> tuple[int, int, FlatParameter]:
        """Return (first element, end, parameter) of the parameter that holds an element."""
        time, inside = divmod(element, self.size)
        at = bisect_right(self._starts, inside) - 1
        return time * self.size + self._starts[at], time * self.size + self._starts[at + 1], self._rows[at]

    def before(self, end: int, copies: TensorCopies) -> int:
        """Return the elements before `end` of parameters with such copies."""
        if end <= 0:
            return 0
        times, inside = divmod(end, self.size)
        rows = [(start, row.elements) for start, row in zip(self._starts, self._rows, strict=False) if row.copies == copies]
        return times * sum(elements for _, elements in rows) + sum(max(0, min(inside - start, elements)) for start, elements in rows)


_NO_RANK = 1 << 200  # beyond any rank


def _flat_groups(held: StageParameters) -> Iterator[FlatGroup]:
    """Yield the flat tensors: of what decays, of what does not, and of each the experts that are split over ranks."""
    for decays, expert in ((True, False), (False, False), (True, True), (False, True)):
        group = FlatGroup(held, decays=decays, expert=expert)
        if group.size:
            yield group
