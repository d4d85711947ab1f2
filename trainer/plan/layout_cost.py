"""A layout's whole cost: memory of every stage and the step's seconds, the one reckoning that plan and estimate share."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from .axes import pp
from .block_costs import Pieces
from .cost_context import Frame, split_of
from .layout import Layout
from .schedules import SCHEDULES
from .stage_cost import Stage, last_held, stage


class Seconds(NamedTuple):
    """A step by cause: they add up to `step`. `fill` is the bubble's share of the pipeline's time."""

    step: float
    compute: float
    exposed: float
    bubble: float
    optimizer: float
    fill: float


class Costs(NamedTuple):
    """Bytes of the fullest rank and its stage, the first of those that are as full; each kind of stage; seconds (None: a rate is
    unknown)."""

    peak: int
    fullest: int
    kinds: list[Stage]
    pieces: Pieces
    seconds: Seconds | None


def costs(frame: Frame, layout: Layout) -> Costs:
    """Memory by stage and the step's time."""
    pieces = frame.pieces(split_of(layout.parallel, layout.microbatch), layout.wires)
    kinds = _kinds(frame, layout, pieces)
    # Of stages that are alike the first holds most: what a schedule has in flight, and its copies of weights, grow towards the front.
    peak, fullest = max([(stage_bytes(layout, kinds[at], index), -index) for index, at in layout.partition.runs])
    seconds = _seconds(frame, layout, pieces, kinds) if timed(frame, layout) else None
    return Costs(peak, -fullest, kinds, pieces, seconds)


def stage_bytes(layout: Layout, kind: Stage, index: int) -> int:
    """Bytes of a rank of a stage of this kind."""
    held = kind.fixed + ceil((kind.kept + kind.passing) * in_flight(layout, index))
    return held + spare(layout, index) * kind.weights


def _kinds(frame: Frame, layout: Layout, pieces: Pieces) -> list[Stage]:
    """The cost of each kind of stage; schedules that hold as many micro-batches on the last stage share them."""
    parallel = layout.parallel
    key = (id(pieces), layout.mesh, layout.way, layout.shard, parallel.offload, last_held(layout), layout.folded)
    found = frame.stages.get(key)
    if found is None:
        found = frame.stages[key] = [stage(frame, layout, pieces, kind) for kind in layout.partition.kinds]
    return found


def in_flight(layout: Layout, index: int) -> float:
    """Micro-batches whose activations a stage holds at once; one where there is no pipeline."""
    stages, parallel = layout.mesh.pp, layout.parallel
    return 1 if stages == 1 else SCHEDULES[parallel.schedule].in_flight(index, stages, layout.micros, parallel.chunks)


def spare(layout: Layout, index: int) -> int:
    """Older copies of its weights that a stage keeps, for schedules that don't flush."""
    schedule, stages = SCHEDULES[layout.parallel.schedule], layout.mesh.pp
    return 0 if stages == 1 or schedule.flushes else schedule.versions(index, stages) - 1


def timed(frame: Frame, layout: Layout) -> bool:
    """Whether every rate that the step's time rests on is stated."""
    offload = layout.parallel.offload
    if frame.rates is None or offload.optimizer or offload.parameters:
        return False
    return layout.wires.known


def sends(layout: Layout, index: int) -> int:
    """Tensors that a stage hands to its neighbours in a step: forward to the next, gradients to the one before.

    With chunks the stages form a ring: last and first are neighbours too, but for the model's two ends. A folded pipeline turns
    around on the last stage, and ends on the first.
    """
    stages, chunks = layout.mesh.pp, layout.parallel.chunks
    if stages == 1:
        return 0
    if layout.folded:
        return layout.micros * 2 * (2 - (index == stages - 1) - (index == 0))
    forward = chunks - (index == stages - 1)
    backward = chunks - (index == 0)
    return layout.micros * (forward + backward)


def handed(layout: Layout, pieces: Pieces) -> int:
    """Bytes of one tensor that a stage hands on: with `scatter`, its 1/tp."""
    scatter = layout.parallel.scatter and not layout.parallel.sequence
    return -(-pieces.stream // layout.mesh.tp) if scatter else pieces.stream


def _seconds(frame: Frame, layout: Layout, pieces: Pieces, kinds: list[Stage]) -> Seconds:
    """m micro-batches on the busiest stage, the other stages' one while the pipeline fills and drains, what the data axis
    exposes, and the optimizer (arXiv:2104.04473 section 2.2)."""
    stages, micros, parallel = layout.mesh.pp, layout.micros, layout.parallel
    hop = 0.0
    if stages > 1 and not parallel.overlap.pipeline:
        hop = _hop(layout, pieces)
    computes = [kind.forward + kind.backward for kind in kinds]
    totals = [each + kind.talk_forward + kind.talk_backward + hop for each, kind in zip(computes, kinds, strict=True)]
    busiest = max(range(len(kinds)), key=totals.__getitem__)
    bubble = 0.0
    if stages > 1:
        schedule = SCHEDULES[parallel.schedule]
        many = layout.partition.many
        others = sum([total * times for total, times in zip(totals, many, strict=True)]) - totals[busiest]
        hidden = sum([kind.weight * times for kind, times in zip(kinds, many, strict=True)]) - kinds[busiest].weight
        bubble = max(0.0, schedule.fill(parallel.chunks) * others - schedule.hidden(stages, micros) * hidden)
    compute = micros * computes[busiest]
    talk = micros * (totals[busiest] - computes[busiest])
    slowest = max(kinds, key=lambda kind: kind.exposed + kind.step)
    tie = _tied_seconds(frame, layout, pieces)
    pipe = compute + talk + bubble
    return Seconds(
        step=pipe + slowest.exposed + slowest.step + tie,
        compute=compute,
        exposed=talk + slowest.exposed + tie,
        bubble=bubble,
        optimizer=slowest.step,
        fill=bubble / pipe,
    )


def _hop(layout: Layout, pieces: Pieces) -> float:
    """Exposed seconds of a micro-batch's messages between stages: in and out, for each part of the model that a stage has."""
    parts = SCHEDULES[layout.parallel.schedule].parts(layout.parallel.chunks)
    lines = pp.lines(handed(layout, pieces), 2 * parts, layout.wires.pair, exposed=True)
    return sum(line.exposed for line in lines)


def _tied_seconds(frame: Frame, layout: Layout, pieces: Pieces) -> float:
    if layout.mesh.pp == 1 or layout.folded or pieces.tied == 0:
        return 0.0
    return sum(line.exposed for line in pp.tied(pieces.tied * frame.widths.gradient, layout.wires.pair))
