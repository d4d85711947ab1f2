"""How DeepSpeed's ZeRO lays a rank's parameters end to end in flat tensors and deals these out to the data-parallel ranks.

The layers of a model are alike, so that what lies where is reckoned from one of them, however many there are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Literal, NamedTuple

from ...models.table import Parameter, Table, named
from ..weight_slices import placed

ALIGNED = 2  # a flat tensor is padded to a multiple of this and of the ranks (nccl_start_alignment_factor)
MOST_RANKS, MOST_LAYERS = 4096, 256  # of a stage; where both are more, the fullest of so many ranks is not looked for

Also = Literal["", "replicated", "shared"]


class Lie(NamedTuple):
    """One parameter as a rank has it: elements with padding; a matrix, or a vector, which doesn't decay; whether all ranks of the
    tensor axis have it too (`replicated`) or some (`shared`); whether expert ranks have other parts of it."""

    elements: int
    matrix: bool
    also: Also
    expert: bool = False


class Lies(NamedTuple):
    """The parameters that a rank holds, in the table's order: those before the layers, of each layer, and after them."""

    before: tuple[Lie, ...]
    layer: tuple[Lie, ...]
    layers: int
    after: tuple[Lie, ...]


class Flat(NamedTuple):
    """Elements of a rank's part of the flat tensors of stages 1 and 2, of these whole, and of all the parameters that lie in the
    fullest part, wholly or partly; of its part at stage 3, where each parameter is shared out alone."""

    part: int
    whole: int
    touched: int
    apart: int


def lies(table: Table, layers: int, *, first: bool, last: bool, tp: int, vocab_multiple: int, ep: int = 1) -> Lies:
    """The parameters that a rank holds of so many layers and of the ends beside them."""

    def rows(parameters: Iterable[Parameter]) -> Iterator[Lie]:
        for parameter in parameters:
            held = placed(parameter, table.sizes, tp, 0, vocab_multiple=vocab_multiple, ep=ep)
            also: Also = "" if tp == 1 else "shared" if held.shared else "" if held.sharded else "replicated"
            yield Lie(prod(held.size), len(held.size) > 1, also, held.expert)

    before = tuple(rows(named(table, range(0), first=first, last=False)))
    ends = tuple(rows(named(table, range(0), first=first, last=last)))
    return Lies(before, tuple(rows(named(table, range(1), first=False, last=False))), layers, ends[len(before) :])


@lru_cache(maxsize=256)
def flat(held: Lies, ranks: int, ep: int = 1) -> Flat:
    """How parameters lie on so many ranks; experts on those of them that hold the same ones, each `ep`-th."""
    tensors = [(group, ep if group.expert else 1) for group in _groups(held)]
    each = [group.part(ranks // apart) for group, apart in tensors]
    return Flat(
        part=sum(each),
        whole=sum(part * (ranks // apart) for part, (_, apart) in zip(each, tensors, strict=True)),
        touched=_fullest([group.touched(part, apart) for part, (group, apart) in zip(each, tensors, strict=True)], ranks),
        apart=_apart(held, ranks),
    )


@lru_cache(maxsize=256)
def stepped(held: Lies, also: Also, stage: int, ranks: int, data: int | None) -> int:
    """Of the parameters that ranks of the tensor axis have too, the elements that the data-parallel rank `data` steps; None: the one
    that steps most."""
    if stage in (0, 3) or ranks == 1:
        return _apart(held, 1 if stage == 0 else ranks, also)
    found = [group.stepped(group.part(ranks), also) for group in _groups(held)]
    return _fullest(found, ranks) if data is None else sum(stretch(data)[0] for stretch in found)


def _apart(held: Lies, ranks: int, also: Also | None = None) -> int:
    """Elements of a rank's part where each parameter is shared out alone: of all, or of those that others have `also`."""

    def shares(rows: Iterable[Lie]) -> int:
        return sum(-(-lie.elements // ranks) for lie in rows if also in (None, lie.also))

    return shares(held.before) + held.layers * shares(held.layer) + shares(held.after)


Stretch = Callable[[int], tuple[int, int]]  # of a rank: (its elements, the last of the ranks after it that have as many)


def _fullest(found: Sequence[Stretch], ranks: int) -> int:
    """The most that a rank has of all flat tensors together."""
    rank = most = 0
    while rank < ranks:
        rows = [stretch(rank) for stretch in found]
        most = max(most, sum([elements for elements, _ in rows]))
        rank = min([last for _, last in rows], default=ranks) + 1
    return most


class Group:
    """One flat tensor: its parameters that have elements, in order."""

    def __init__(self, held: Lies, *, matrix: bool, expert: bool) -> None:
        self.expert = expert
        self._parts = [
            _Block([lie for lie in rows if lie.elements and (lie.matrix, lie.expert) == (matrix, expert)], times)
            for rows, times in ((held.before, 1), (held.layer, held.layers), (held.after, 1))
        ]
        self._starts = (0, *accumulate(block.size * block.times for block in self._parts))
        self.size = self._starts[-1]

    def part(self, ranks: int) -> int:
        """Elements of a rank's part."""
        return -(-self.size // (ALIGNED * ranks)) * ALIGNED

    def touched(self, each: int, apart: int) -> Stretch:
        """Elements of the parameters that lie in a rank's part; `apart` ranks in a row have the same part."""

        def stretch(rank: int) -> tuple[int, int]:
            start = rank // apart * each
            if start >= self.size:
                return 0, _NEVER
            first, end, _ = self._at(start)
            if end >= start + each:  # all of the part is in one parameter, as of the ranks after it
                return end - first, end // each * apart - 1
            return self._at(min(start + each, self.size) - 1)[1] - first, (rank // apart + 1) * apart - 1

        return stretch

    def stepped(self, each: int, also: Also) -> Stretch:
        """Elements of a rank's part that others of the tensor axis have too."""

        def stretch(rank: int) -> tuple[int, int]:
            start = rank * each
            if start >= self.size:
                return 0, _NEVER
            _, end, lie = self._at(start)
            if end >= start + each:
                return each * (lie.also == also), end // each - 1
            return self._held(min(start + each, self.size), also) - self._held(start, also), rank

        return stretch

    def _at(self, element: int) -> tuple[int, int, Lie]:
        """The parameter that holds an element: its first element, its end, itself."""
        at = bisect_right(self._starts, element) - 1
        first, end, lie = self._parts[at].find(element - self._starts[at])
        return self._starts[at] + first, self._starts[at] + end, lie

    def _held(self, end: int, also: Also) -> int:
        """Elements before an end that others have too."""
        return sum(
            block.held(min(end - start, block.size * block.times), also) for start, block in zip(self._starts, self._parts, strict=False)
        )


class _Block:
    """Parameters that stand one after the other, so many times."""

    def __init__(self, rows: list[Lie], times: int) -> None:
        self._rows, self.times = rows, times
        self._starts = (0, *accumulate(lie.elements for lie in rows))
        self.size = self._starts[-1]

    def find(self, element: int) -> tuple[int, int, Lie]:
        """(first element, end, parameter) of that which holds an element."""
        time, inside = divmod(element, self.size)
        at = bisect_right(self._starts, inside) - 1
        return time * self.size + self._starts[at], time * self.size + self._starts[at + 1], self._rows[at]

    def held(self, end: int, also: Also) -> int:
        """Elements before an end of parameters that others have too."""
        if end <= 0:
            return 0
        times, inside = divmod(end, self.size)
        rows = [(start, lie.elements) for start, lie in zip(self._starts, self._rows, strict=False) if lie.also == also]
        return times * sum(elements for _, elements in rows) + sum(max(0, min(inside - start, elements)) for start, elements in rows)


_NEVER = 1 << 200  # a rank that there is not


def _groups(held: Lies) -> Iterator[Group]:
    """What decays and what doesn't, and experts that are on several ranks: each is one flat tensor."""
    for matrix, expert in ((True, False), (False, False), (True, True)):
        group = Group(held, matrix=matrix, expert=expert)
        if group.size:
            yield group
