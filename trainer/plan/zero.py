"""What DeepSpeed ZeRO 0.19 holds on a rank: more than the papers' stages, as counted on live tensors.

A rank's gradients are those that stand between two micro-batches, beside activations; the optimizer's step holds besides, one group
of weights after another and with activations gone, a float32 copy of its part of them.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ..models.table import Table, named

ALIGNED = 2  # a flat tensor is padded to a multiple of this and of the ranks (nccl_start_alignment_factor)
LIVE = 1_000_000_000  # parameters that stage 3 keeps gathered (stage3_max_live_parameters)
MASTER = 4  # bytes an element of the weights that are stepped


class Flat(NamedTuple):
    """Elements of the fullest rank's part of the flat tensors, and of all the parameters that lie in it, wholly or partly."""

    part: int
    touched: int


class Zero(NamedTuple):
    """What decides what DeepSpeed holds: its ZeRO stage, ranks, micro-batches, bytes an element of weights, gradients, states."""

    stage: int
    ranks: int
    micros: int
    weight: int
    gradient: int
    states: int
    bucket: int


class Holds(NamedTuple):
    """Bytes on a rank."""

    weights: int
    gradients: int
    optimizer: int
    buffers: int


def stage_of(zero: int, *, half: bool) -> int:
    """The stage that DeepSpeed is told: in half precision at least 1 (trainer/engines/zero.py)."""
    return max(1, zero) if half else zero


def flat(table: Table, layers: int, ranks: int) -> Flat:
    """How the parameters lie on the ranks of stages 1 and 2."""
    part, touched = 0, [0] * ranks
    shapes = [parameter.shape(table.sizes) for parameter in named(table, range(layers))]
    matrices, vectors = ([prod(shape) for shape in shapes if (len(shape) > 1) == decays] for decays in (True, False))
    for runs in filter(None, (matrices, vectors)):  # what decays and what doesn't: each is one flat tensor
        each = -(-sum(runs) // (ALIGNED * ranks)) * ALIGNED
        part += each
        start = 0
        for run in runs:
            for rank in range(start // each, (start + run - 1) // each + 1):
                touched[rank] += run
            start += run
    return Flat(part, max(touched))


def holds(way: Zero, whole: int, lies: Flat) -> Holds:
    """Bytes of `whole` parameters."""
    shared = lies.part
    match way.stage:
        case 0:
            passing = whole * way.gradient if way.ranks > 1 else 0  # what is reduced is a flat copy
            return Holds(whole * way.weight, whole * way.gradient, whole * way.states, passing)
        case 3:
            gathered = min(whole, LIVE) * way.weight if way.ranks > 1 else 0
            return Holds(shared * way.weight, shared * way.gradient, shared * (MASTER + way.states), gathered + way.bucket * way.weight)
        case stage:
            optimizer, bucket = shared * (MASTER + way.states), min(whole, way.bucket) * way.weight
            return Holds(whole * way.weight, _gradients(way, stage, whole, lies), optimizer, bucket)


def _gradients(way: Zero, stage: int, whole: int, lies: Flat) -> int:
    """Stage 1 reduces once a step, stage 2 at every micro-batch: from then on a rank keeps what its part touches.

    Where bf16 adds up in float32 stage 1 is another optimizer, which keeps all, and stage 2 keeps its part alone.
    """
    wide = way.gradient > way.weight
    if stage == 1:
        return (whole if wide or way.micros > 1 else lies.touched) * way.gradient
    return (lies.part if wide else lies.touched) * way.gradient
