"""What DeepSpeed ZeRO 0.19 holds on a rank: more than the papers' stages, as counted on live tensors.

A rank's gradients are those that stand between two micro-batches, beside activations; the optimizer's step holds besides, one group
of weights after another and with activations gone, a float32 copy of its part of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Literal, NamedTuple

from ..models.table import Parameter, Table, named
from .slices import placed

ALIGNED = 2  # a flat tensor is padded to a multiple of this and of the ranks (nccl_start_alignment_factor)
LIVE = 1_000_000_000  # parameters that stage 3 keeps gathered (stage3_max_live_parameters)
MASTER = 4  # bytes an element of the weights that are stepped

Also = Literal["", "replicated", "shared"]


class Lie(NamedTuple):
    """One parameter as a rank has it: elements with padding; a matrix, or a vector, which doesn't decay; whether all ranks of the
    tensor axis have it too (`replicated`) or some (`shared`); whether expert ranks have other parts of it."""

    elements: int
    matrix: bool
    also: Also
    expert: bool = False


class Flat(NamedTuple):
    """Elements of a rank's part of the flat tensors of stages 1 and 2, of these whole, and of all the parameters that lie in the
    fullest part, wholly or partly; of its part at stage 3, where each parameter is shared out alone."""

    part: int
    whole: int
    touched: int
    apart: int


class Zero(NamedTuple):
    """What decides what DeepSpeed holds: its ZeRO stage, ranks, micro-batches, bytes an element of weights, gradients, states,
    elements of a bucket, and whether a pipeline's engine runs it."""

    stage: int
    ranks: int
    micros: int
    weight: int
    gradient: int
    states: int
    bucket: int
    pipeline: bool


class Holds(NamedTuple):
    """Bytes on a rank."""

    weights: int
    gradients: int
    optimizer: int
    buffers: int


def stage_of(zero: int, *, half: bool, ep: int = 1) -> int:
    """The stage that DeepSpeed is told: in half precision and with expert ranks at least 1 (trainer/engines/settings.py)."""
    return max(1, zero) if half or ep > 1 else zero


def lies(table: Table, layers: int, *, first: bool, last: bool, tp: int, vocab_multiple: int, ep: int = 1) -> tuple[Lie, ...]:
    """The parameters that a rank holds of so many layers and of the ends beside them, in the table's order."""

    def rows(parameters: Iterable[Parameter]) -> Iterator[Lie]:
        for parameter in parameters:
            held = placed(parameter, table.sizes, tp, 0, vocab_multiple=vocab_multiple, ep=ep)
            also: Also = "" if tp == 1 else "shared" if held.shared else "" if held.sharded else "replicated"
            yield Lie(prod(held.size), len(held.size) > 1, also, held.expert)

    before = tuple(rows(named(table, range(0), first=first, last=False)))
    ends = tuple(rows(named(table, range(0), first=first, last=last)))
    return before + tuple(rows(named(table, range(1), first=False, last=False))) * layers + ends[len(before) :]


def flat(held: Sequence[Lie], ranks: int, ep: int = 1) -> Flat:
    """How parameters lie on so many ranks; experts on those of them that hold the same ones, each `ep`-th."""
    part, whole, touched = 0, 0, [0] * ranks
    for group in _groups(held):
        apart = ep if group[0].expert else 1
        each = _each(group, ranks // apart)
        part, whole = part + each, whole + each * (ranks // apart)
        for lie, start in _starts(group):
            for rank in range(start // each * apart, ((start + lie.elements - 1) // each + 1) * apart):
                touched[rank] += lie.elements
    return Flat(part, whole, max(touched), sum(-(-lie.elements // ranks) for lie in held))


def stepped(held: Sequence[Lie], also: Also, stage: int, ranks: int) -> list[int]:
    """Of the parameters that ranks of the tensor axis have too, the elements that each data-parallel rank steps."""
    mine = [lie.elements for lie in held if lie.also == also]
    if stage in (0, 3) or ranks == 1:
        return [sum(mine) if stage == 0 else sum(-(-each // ranks) for each in mine)] * ranks
    found = [0] * ranks
    for group in _groups(held):
        each = _each(group, ranks)
        for lie, start in _starts(group):
            if lie.also == also:
                for rank in range(start // each, (start + lie.elements - 1) // each + 1):
                    found[rank] += min(start + lie.elements, (rank + 1) * each) - max(start, rank * each)
    return found


def _groups(held: Sequence[Lie]) -> Iterator[list[Lie]]:
    """What decays and what doesn't, and experts that are on several ranks: each is one flat tensor."""
    for matrix, expert in ((True, False), (False, False), (True, True)):
        if group := [lie for lie in held if (lie.matrix, lie.expert) == (matrix, expert)]:
            yield group


def _each(group: list[Lie], ranks: int) -> int:
    """Elements of a rank's part of a flat tensor."""
    return -(-sum(lie.elements for lie in group) // (ALIGNED * ranks)) * ALIGNED


def _starts(group: list[Lie]) -> Iterator[tuple[Lie, int]]:
    """Each that has elements, and where it starts in the flat tensor."""
    start = 0
    for lie in group:
        if lie.elements:
            yield lie, start
            start += lie.elements


def holds(way: Zero, whole: int, lain: Flat) -> Holds:
    """Bytes of `whole` parameters."""
    match way.stage:
        case 0:
            passing = whole * way.gradient if way.ranks > 1 else 0  # what is reduced is a flat copy
            return Holds(whole * way.weight, whole * way.gradient, whole * way.states, passing)
        case 3:
            gathered = min(whole, LIVE) * way.weight if way.ranks > 1 else 0
            part = lain.apart
            return Holds(part * way.weight, part * way.gradient, part * (MASTER + way.states), gathered + way.bucket * way.weight)
        case stage:
            optimizer = lain.part * (MASTER + way.states)
            return Holds(lain.whole * way.weight, _gradients(way, stage, whole, lain), optimizer, _passing(way, whole))


def _gradients(way: Zero, stage: int, whole: int, lain: Flat) -> int:
    """Stage 1 reduces once a step, stage 2 at every micro-batch: from then on a rank keeps what its part touches.

    Where bf16 adds up in float32 stage 1 is another optimizer, which keeps all, and stage 2 keeps its part alone. A pipeline
    reduces when the last micro-batch has gone back.
    """
    wide = way.gradient > way.weight
    if stage == 1:
        return (whole if wide or way.pipeline or way.micros > 1 else lain.touched) * way.gradient
    return (lain.part if wide else lain.touched) * way.gradient


def _passing(way: Zero, whole: int) -> int:
    """The bucket in which gradients are reduced, made in full; a pipeline's bf16 optimizer makes a flat copy of them all."""
    if way.pipeline and way.gradient > way.weight:
        return whole * way.gradient if way.ranks > 1 else 0
    return way.bucket * way.weight
