"""A measured step of a run, from the timelines of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from ..plan.timeline.step_segments import Lane
from ..plan.timeline.timed_spans import TimedSpan, TimedStep
from .timeline_files import RankTimeline


@dataclass(frozen=True, kw_only=True)
class MachineUse:
    """The processes of a run on one machine's CPU: how many, on how many cores, with how many threads each at most, for what share of these
    cores' time they ran, and for what share of the time in their passes and steps, were all of it on one thread each."""

    processes: int
    cores: int
    threads: int
    busy: float
    ran: float


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The timed step whose length is the median: its number, its lanes in order of `ranks`, the seconds of all timed steps.

    `machines` are those on whose CPUs the ranks computed. Clocks of several machines agree to `clock_error` seconds.
    """

    step: int
    lanes: tuple[Lane, ...]
    ranks: tuple[int, ...]
    seconds: dict[int, float]
    machines: tuple[MachineUse, ...]
    clock_error: float


def measured_step(timelines: Sequence[RankTimeline], stages: int) -> MeasuredStep:
    """Return the median step of ranks whose layout has so many stages."""
    numbers = [step.step for step in timelines[0].steps]
    lengths = [
        max(each.end for each in steps) - min(each.start for each in steps) for steps in zip(*(t.steps for t in timelines), strict=True)
    ]
    chosen = lengths.index(median_low(lengths))
    begin = min(each.steps[chosen].start for each in timelines)
    each_stage = timelines[0].world // stages
    return MeasuredStep(
        step=numbers[chosen],
        lanes=tuple(_lane(each.steps[chosen], begin, stage=each.rank // each_stage, replica=each.rank % each_stage) for each in timelines),
        ranks=tuple(each.rank for each in timelines),
        seconds=dict(zip(numbers, lengths, strict=True)),
        machines=tuple(_machines(timelines, chosen, lengths[chosen])),
        clock_error=max(each.clock_error for each in timelines),
    )


def _lane(step: TimedStep, begin: float, *, stage: int, replica: int) -> Lane:
    spans = tuple([TimedSpan(kind, micro, part, start - begin, end - begin) for kind, micro, part, start, end in step.spans])
    return Lane(stage=stage, replica=replica, start=step.start - begin, end=step.end - begin, spans=spans)


def _machines(timelines: Sequence[RankTimeline], chosen: int, seconds: float) -> list[MachineUse]:
    """The use of each machine whose CPU computed."""
    on: dict[str, list[RankTimeline]] = {}
    for each in timelines:
        if each.device == "cpu":
            on.setdefault(each.machine, []).append(each)
    found = []
    for ranks in on.values():
        cores = len({core for each in ranks for core in each.cores})
        cpu = sum(each.steps[chosen].cpu for each in ranks)
        computing = sum(span.end - span.start for each in ranks for span in each.steps[chosen].spans if span.is_pass or span.kind == "step")
        found.append(
            MachineUse(
                processes=len(ranks),
                cores=cores,
                threads=max(each.threads for each in ranks),
                busy=cpu / (seconds * cores) if seconds and cores else 0.0,
                ran=cpu / computing if computing else 0.0,
            )
        )
    return found
