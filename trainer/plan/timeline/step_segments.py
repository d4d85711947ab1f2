"""A step cut into segments, each with its cause: the same rules for one that was measured and one that is simulated.

A rank that waits for another stage is idle until that stage has computed what it waits for; what then passes until it goes on is messages.
After its last pass it is idle until the last rank joins what all do together: the sum of a tied weight's gradients, the agreement on the
norm before the optimizer's step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .timed_spans import NONE, TimedSpan
from .timeline import Timeline

Cause = Literal["F", "B", "I", "W", "messages", "sums", "step", "data", "other", "fill", "wait", "drain"]
CAUSES: tuple[Cause, ...] = ("F", "B", "I", "W", "messages", "sums", "step", "data", "other", "fill", "wait", "drain")
IDLE_CAUSES: tuple[Cause, ...] = ("fill", "wait", "drain")
CAUSE_OF: dict[str, Cause] = {  # of spans that are no pass
    "receive": "messages",
    "send": "messages",
    "sum": "sums",
    "tied": "sums",
    "gather": "sums",
    "sync": "sums",
    "step": "step",
    "data": "data",
    "host": "other",
    "drain": "drain",
}
CLOSE = 1e-9  # share of a step by which sums of the same seconds may differ


class Segment(NamedTuple):
    """A piece of a rank's step; `waits_for` is the lane whose result an idle one waits for, where that is known."""

    cause: Cause
    start: float
    end: float
    micro: int = NONE
    part: int = NONE
    waits_for: int = NONE

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Lane:
    """What one rank of a stage does in a step, in seconds from the step's start: from `start` to `end` it is in the step. Ranks of one
    replica send each other hidden states."""

    stage: int
    replica: int
    start: float
    end: float
    spans: tuple[TimedSpan, ...]


@dataclass(frozen=True, kw_only=True)
class SegmentedStep:
    """A step's lanes and the segments of each, which follow one another from 0 to `seconds`."""

    seconds: float
    lanes: tuple[Lane, ...]
    segments: tuple[tuple[Segment, ...], ...]


def simulated_lanes(timeline: Timeline) -> tuple[Lane, ...]:
    """Return the lanes of a simulated step, one a stage."""
    return tuple(
        Lane(
            stage=stage.index,
            replica=0,
            start=0.0,
            end=timeline.seconds,
            spans=tuple([TimedSpan(span.kind, span.micro, span.part, span.start, span.end) for span in stage.spans]),
        )
        for stage in timeline.stages
    )


def segmented_step(lanes: Sequence[Lane], *, origin: Literal["measured", "simulated"]) -> SegmentedStep:
    """Return the segments of a step of lanes. What no span covers is the host's in a measured step; in a simulated one it is the flight of
    a message or a wait."""
    cutter = _Cutter(lanes, is_measured=origin == "measured")
    return SegmentedStep(
        seconds=cutter.seconds,
        lanes=tuple(lanes),
        segments=tuple([tuple(each for each in cutter.segments(number) if each.end > each.start) for number in range(len(lanes))]),
    )


class _Cutter:
    """Cuts lanes into segments."""

    def __init__(self, lanes: Sequence[Lane], *, is_measured: bool) -> None:
        self.lanes, self.is_measured = lanes, is_measured
        self.seconds = max(lane.end for lane in lanes)
        self.last_stage = max(lane.stage for lane in lanes)
        self.made = {
            (lane.replica, span.kind == "F", span.micro, span.part): (number, span.end)
            for number, lane in enumerate(lanes)
            for span in lane.spans
            if span.kind in ("F", "B", "I")
        }
        self.join_times = self._join_times()

    def segments(self, number: int) -> Iterator[Segment]:
        """The segments of a lane, in order; some may be empty."""
        lane, at, idle = self.lanes[number], 0.0, IDLE_CAUSES[0]
        between: list[TimedSpan] = []
        for span in lane.spans:
            if not span.is_pass:
                between.append(span)
                continue
            maker, made = self._input_source(number, span)
            waited = min(max(made, at), span.start)
            yield Segment(idle, at, waited, waits_for=maker)
            yield from _segments_between(between, waited, span.start, "other" if self.is_measured else "messages")
            yield Segment(_pass_cause(span.kind), span.start, span.end, span.micro, span.part)
            at, idle, between = span.end, "wait", []
        yield from self._end(number, between, at)

    def _input_source(self, number: int, span: TimedSpan) -> tuple[int, float]:
        """(the lane that makes what a pass takes, when it has made it); (NONE, 0): no other lane does."""
        if span.kind == "W":
            return NONE, 0.0
        part = span.part - 1 if span.kind == "F" else span.part + 1
        maker, made = self.made.get((self.lanes[number].replica, span.kind == "F", span.micro, part), (NONE, 0.0))
        return (NONE, 0.0) if maker == number else (maker, made)

    def _end(self, number: int, spans: Sequence[TimedSpan], at: float) -> Iterator[Segment]:
        """What follows a lane's last pass."""
        if not self.is_measured:
            yield from _segments_between(spans, at, self.seconds, "drain")
            return
        leaves = max(at, self.lanes[number].end)
        yield from _segments_between(list(self._with_waits(number, spans)), at, leaves, "other")
        yield Segment("drain", leaves, max(leaves, self.seconds))

    def _with_waits(self, number: int, spans: Sequence[TimedSpan]) -> Iterator[TimedSpan]:
        """Spans, each collective in two: until its last rank has joined it, and then."""
        lane, counts = self.lanes[number], Counter[str]()
        for span in spans:
            if not (members := _members(lane, span.kind, self.last_stage)):
                yield span
                continue
            joined = min(span.end, max(span.start, self.join_times[span.kind, counts[span.kind], members]))
            counts[span.kind] += 1
            yield span._replace(kind="drain", end=joined)
            yield span._replace(start=joined)

    def _join_times(self) -> dict[tuple[str, int, str], float]:
        """When the last rank joins each collective after the passes: (kind, its number among those of its kind, who takes part) -> when."""
        joined: dict[tuple[str, int, str], float] = {}
        for lane in self.lanes:
            counts = Counter[str]()
            for span in _after_passes(lane):
                if members := _members(lane, span.kind, self.last_stage):
                    key = span.kind, counts[span.kind], members
                    joined[key] = max(joined.get(key, 0.0), span.start)
                    counts[span.kind] += 1
        return joined


def _members(lane: Lane, kind: str, last_stage: int) -> str:
    """The ranks that take part in a collective with a lane, as a word; "": it is none whose ranks are known."""
    if kind == "sync":
        return "all"
    return f"ends of {lane.replica}" if kind == "tied" and lane.stage in (0, last_stage) else ""


def _after_passes(lane: Lane) -> tuple[TimedSpan, ...]:
    last = max((at for at, span in enumerate(lane.spans) if span.is_pass), default=-1)
    return lane.spans[last + 1 :]


def _pass_cause(kind: str) -> Cause:
    return CAUSES["FBIW".index(kind)]


def _segments_between(spans: Sequence[TimedSpan], start: float, end: float, uncovered: Cause) -> Iterator[Segment]:
    """Segments from `start` to `end`: of the spans between, in order, and of what none of them covers."""
    at = start
    for span in spans:
        begin, stop = max(at, span.start), min(end, span.end)
        if stop > begin:
            yield Segment(uncovered, at, begin)
            yield Segment(CAUSE_OF.get(span.kind, "other"), begin, stop)
            at = stop
    yield Segment(uncovered, at, max(at, end))


def stage_seconds(step: SegmentedStep) -> list[dict[Cause, float]]:
    """Return the seconds of each stage by cause, the mean of its ranks; they add up to those of the step."""
    stages = 1 + max(lane.stage for lane in step.lanes)
    found: list[dict[Cause, float]] = [dict.fromkeys(CAUSES, 0.0) for _ in range(stages)]
    ranks = [sum(lane.stage == stage for lane in step.lanes) for stage in range(stages)]
    for lane, segments in zip(step.lanes, step.segments, strict=True):
        for each in segments:
            found[lane.stage][each.cause] += each.seconds / ranks[lane.stage]
    return found


def path_seconds(step: SegmentedStep) -> dict[Cause, float]:
    """Return the seconds of a step's critical path by cause, which add up to those of the step.

    From the step's end it goes back along a lane; where that is idle, it goes on where the lane was waited for.
    """
    seconds: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
    lane = max(range(len(step.lanes)), key=lambda number: _last_busy(step.segments[number]))
    ends = [[each.end for each in segments] for segments in step.segments]
    at, close = step.seconds, CLOSE * step.seconds
    while at > close:
        segment = _segment_at(step, ends, lane, at - close)
        if segment.cause in IDLE_CAUSES:
            other = segment.waits_for if segment.waits_for != NONE else _busy_until(step, ends, at, close)
            if other != NONE and _segment_at(step, ends, other, at - close).cause not in IDLE_CAUSES:
                lane = other
                segment = _segment_at(step, ends, lane, at - close)
        seconds[segment.cause] += at - segment.start
        at = segment.start
    return seconds


def _last_busy(segments: Sequence[Segment]) -> float:
    return max((each.end for each in segments if each.cause not in IDLE_CAUSES), default=0.0)


def _segment_at(step: SegmentedStep, ends: Sequence[Sequence[float]], lane: int, at: float) -> Segment:
    """The segment of a lane that a moment is in."""
    return step.segments[lane][min(bisect_left(ends[lane], at), len(ends[lane]) - 1)]


def _busy_until(step: SegmentedStep, ends: Sequence[Sequence[float]], at: float, close: float) -> int:
    """The lane whose busy segment ends nearest to a moment until which others wait; NONE: there is none."""
    found = [
        (abs(segment.end - at), number)
        for number in range(len(step.lanes))
        if (segment := _segment_at(step, ends, number, at - close)).cause not in IDLE_CAUSES
    ]
    return min(found)[1] if found else NONE
