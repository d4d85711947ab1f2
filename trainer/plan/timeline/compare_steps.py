"""A measured step beside the simulated one of the same run: where they differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

from .step_segments import CAUSES, IDLE_CAUSES, Cause, Segment, SegmentedStep, path_seconds, stage_seconds
from .timed_spans import PASSES
from .timeline import SpanKind, StageTimeline, StepSpan, Timeline, Transfer

KIND_OF: dict[Cause, SpanKind] = {"messages": "send", "sums": "sum", "step": "step", "data": "data", "other": "other"}


class ActionDifference(NamedTuple):
    """The seconds of a kind of action on a stage, each of `number` in a step: as measured, the mean of its ranks, and as simulated."""

    kind: str
    stage: int
    number: int
    measured: float
    simulated: float

    @property
    def seconds(self) -> float:
        """By how much all of them are longer than simulated."""
        return self.number * (self.measured - self.simulated)


class SlowRank(NamedTuple):
    """The rank whose passes take longest beside those of its stage's other ranks, and how many times the mean of these."""

    lane: int
    times: float


@dataclass(frozen=True, kw_only=True)
class StepComparison:
    """A measured step and the simulated one, cut by the same rules."""

    measured: SegmentedStep
    simulated: SegmentedStep

    @cached_property
    def stages(self) -> tuple[list[dict[Cause, float]], list[dict[Cause, float]]]:
        """The seconds of each stage by cause, measured and simulated."""
        return stage_seconds(self.measured), stage_seconds(self.simulated)

    @cached_property
    def paths(self) -> tuple[dict[Cause, float], dict[Cause, float]]:
        """The seconds of the critical path by cause, measured and simulated."""
        return path_seconds(self.measured), path_seconds(self.simulated)

    def path_differences(self) -> list[tuple[Cause, float]]:
        """By how much each cause makes the measured step longer, the largest difference first; they add up to the steps' difference."""
        measured, simulated = self.paths
        return sorted(((cause, measured[cause] - simulated[cause]) for cause in CAUSES), key=lambda each: -abs(each[1]))

    def actions(self) -> list[ActionDifference]:
        """The kinds of actions on each stage, passes and the optimizer's step, those that make the largest difference first."""
        found = [
            ActionDifference(kind, stage, number, seconds, simulated / number)
            for stage in range(len(self.stages[0]))
            for kind in (*PASSES, "step")
            if (both := _action_seconds(self.measured, stage, kind)) and (simulated := _total(self.simulated, stage, kind))
            for number, seconds in [both]
        ]
        return sorted(found, key=lambda each: -abs(each.seconds))

    def slow_rank(self) -> SlowRank | None:
        """The rank that stands out most in its stage; None where each stage has one."""
        computing = [sum(each.seconds for each in segments if each.cause in PASSES) for segments in self.measured.segments]
        lanes = self.measured.lanes
        found = []
        for number, lane in enumerate(lanes):
            others = [computing[at] for at, other in enumerate(lanes) if other.stage == lane.stage and at != number]
            if others and (mean := fmean(others)):
                found.append(SlowRank(number, computing[number] / mean))
        return max(found, key=lambda each: each.times, default=None)


def _action_seconds(step: SegmentedStep, stage: int, kind: str) -> tuple[int, float] | None:
    """(how many a rank does, mean seconds of one) of a kind of action on a stage; all steps of the optimizer are one. None: none."""
    each = [segment for segment in _segments_of(step, stage) if segment.cause == kind]
    if not each:
        return None
    ranks = sum(lane.stage == stage for lane in step.lanes)
    number = 1 if kind == "step" else round(len(each) / ranks)
    return number, sum(segment.seconds for segment in each) / (ranks * number)


def _total(step: SegmentedStep, stage: int, kind: str) -> float:
    return sum(segment.seconds for segment in _segments_of(step, stage) if segment.cause == kind)


def _segments_of(step: SegmentedStep, stage: int) -> Iterator[Segment]:
    for lane, segments in zip(step.lanes, step.segments, strict=True):
        if lane.stage == stage:
            yield from segments


def lane_spans(step: SegmentedStep, number: int) -> tuple[StepSpan, ...]:
    """Return the segments in which a lane is not idle, as spans of its stage."""
    return tuple(
        [
            StepSpan(step.lanes[number].stage, _span_kind(each.cause), each.start, each.end, 0.0, each.micro, each.part)
            for each in step.segments[number]
            if each.cause not in IDLE_CAUSES
        ]
    )


def _span_kind(cause: Cause) -> SpanKind:
    return KIND_OF.get(cause) or cause  # type: ignore[return-value]


def measured_timeline(step: SegmentedStep, simulated: Timeline) -> Timeline:
    """Return the measured step of the first replica in the form of a simulated one, to be drawn."""
    lanes = {lane.stage: number for number, lane in enumerate(step.lanes) if lane.replica == 0}
    stages = tuple([_stage_timeline(step, lanes[stage.index], stage) for stage in simulated.stages])
    return replace(simulated, seconds=step.seconds, stages=stages, transfers=tuple(_transfers(stages, simulated)))


def _stage_timeline(step: SegmentedStep, number: int, simulated: StageTimeline) -> StageTimeline:
    seconds = {cause: sum(each.seconds for each in step.segments[number] if each.cause == cause) for cause in CAUSES}
    messages = seconds["messages"] + seconds["sums"]
    filling, waiting, draining = (seconds[cause] for cause in IDLE_CAUSES)
    return replace(
        simulated,
        spans=lane_spans(step, number),
        computing=sum(seconds.values()) - messages - filling - waiting - draining,
        messages=messages,
        filling=filling,
        waiting=waiting,
        draining=draining,
    )


def _transfers(stages: tuple[StageTimeline, ...], simulated: Timeline) -> Iterator[Transfer]:
    """What stages sent each other: from the end of the pass that made it to the start of the one that took it."""
    passes = {
        (span.kind == "F", span.micro, span.part): span for stage in stages for span in stage.spans if span.is_pass and span.kind != "W"
    }
    for each in simulated.transfers:
        forward = each.kind == "F"
        taker = passes.get((forward, each.micro, each.part))
        maker = passes.get((forward, each.micro, each.part - 1 if forward else each.part + 1))
        if taker and maker:
            yield each._replace(start=maker.end, end=max(maker.end, taker.start))
