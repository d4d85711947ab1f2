"""What DeepSpeed ZeRO 0.19 holds on a rank: more than the papers' stages, as counted on live tensors.

A rank's gradients are those that stand between two micro-batches, beside activations; the optimizer's step holds besides, one group
of weights after another and with activations gone, a float32 copy of its part of them.
"""

from __future__ import annotations

from typing import NamedTuple

from .flat_tensors import Flat

LIVE = 1_000_000_000  # parameters that stage 3 keeps gathered (stage3_max_live_parameters)
MASTER = 4  # bytes an element of the weights that are stepped


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
    """The stage that DeepSpeed is told: in half precision and with expert ranks at least 1 (trainer/engines/deepspeed/settings.py)."""
    return max(1, zero) if half or ep > 1 else zero


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
