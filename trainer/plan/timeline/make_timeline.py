"""Simulates one step of a plan: passes as the schedule orders them, then sums of gradients, the optimizer's step, gathers of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..layout.actions_without_flush import flush_actions, step_actions
from ..layout.layout import Layout
from ..layout.schedules import SCHEDULES, Schedule, part_of, stage_and_chunk
from ..layout.simulate import TimedAction, simulate
from ..layout.update_delay import Delay
from ..layout_cost import in_flight
from .step_costs import StepCosts
from .timed_spans import NONE
from .timeline import SpanKind, StageTimeline, StepSpan, Timeline, Transfer

STEADY = 2  # steps after those that fill a pipeline without a flush, until its steps are alike

Slowness = Mapping[int, float]
"""Stage -> the factor by which its computation takes longer than planned: 1.1, a tenth longer."""

AS_PLANNED: Slowness = {}


class SimulatedSpans(NamedTuple):
    """The spans of each stage, the micro-batches that it holds when the step starts, and the seconds from the step's start to its end."""

    spans: list[list[StepSpan]]
    held: list[int]
    seconds: float


def make_timeline(costs: StepCosts, slowness: Slowness = AS_PLANNED) -> Timeline:
    """Return the simulated step of a layout."""
    layout = costs.layout
    step = _step_without_flush(costs, layout.delay, slowness) if layout.delay else _flushed_step(costs, slowness)
    return Timeline(
        seconds=step.seconds,
        planned=costs.planned,
        schedule=layout.parallel.schedule if layout.mesh.pp > 1 else "",
        flushes=layout.delay is None,
        micros=layout.micros,
        chunks=layout.chunks,
        stages=tuple([_stage_timeline(costs, step, stage) for stage in range(layout.mesh.pp)]),
        transfers=tuple(_transfers(costs, step.spans)),
    )


def _flushed_step(costs: StepCosts, slowness: Slowness) -> SimulatedSpans:
    """The step of a schedule that flushes: all stages step once all gradients are summed, for their norm is one number."""
    layout, stages = costs.layout, costs.layout.mesh.pp
    actions = [step_schedule(layout).actions(stage, stages, layout.micros, layout.chunks) for stage in range(stages)]
    durations = pass_durations(costs, slowness)
    seconds = {key: each.total for key, each in durations.items()}
    events = simulate(actions, folded=layout.is_folded, seconds=lambda *key: seconds[key], send=send_delay(costs)).events
    spans = [[span for timed in each for span in _pass_spans(costs, timed, durations)] for each in events]
    for stage, end in enumerate(costs.ends):
        _append(spans[stage], stage, "sum", spans[stage][-1].end, end.sums)
    if costs.tied:
        begin = max(spans[0][-1].end, spans[-1][-1].end)
        for stage in (0, stages - 1):
            _append(spans[stage], stage, "tied", begin, costs.tied)
    summed = max(each[-1].end for each in spans)
    for stage, end in enumerate(costs.ends):
        stepped = _append(spans[stage], stage, "step", summed, end.step)
        _append(spans[stage], stage, "gather", stepped, end.gather)
    last = max(each[-1].end for each in spans)
    for stage in range(stages):
        _append(spans[stage], stage, "host", last, costs.host)
    return SimulatedSpans(spans, [0] * stages, last + costs.host)


def step_schedule(layout: Layout) -> Schedule:
    """Return the schedule of a layout that flushes; without stages each micro-batch runs forward and then backward, whatever is named."""
    return layout.schedule if layout.mesh.pp > 1 else SCHEDULES["1f1b"]


def _append(spans: list[StepSpan], stage: int, kind: SpanKind, start: float, seconds: float) -> float:
    """Append a span that is no pass, unless it takes no time; return when it ends."""
    if seconds > 0:
        spans.append(StepSpan(stage, kind, start, start + seconds, 0.0 if kind in ("step", "host") else seconds))
    return start + seconds


def _step_without_flush(costs: StepCosts, delay: Delay, slowness: Slowness) -> SimulatedSpans:
    """A step among others that are alike, from the end of a step's last backward on the last stage to that of the next.

    What follows an update's last backward runs right after it: nothing waits for the other stages.
    """
    stages, micros = costs.layout.mesh.pp, costs.layout.micros
    late = delay.steps_late(stages, micros)
    steps = late + STEADY  # the last of them is shown; others follow it, so that it is not the one that drains the pipeline
    many = (steps + late + 1) * micros
    flushed = [[*step_actions(stage, stages, 0, many), *flush_actions(stage, stages, many)] for stage in range(stages)]
    durations = pass_durations(costs, slowness)
    updates = {
        ("B", stage, micro): sum(seconds for _, seconds in _update_seconds(costs, delay, stage))
        for stage in range(stages)
        for micro in range(many)
        if _ends_update(delay, micro, micros)
    }
    seconds = {key: each.total for key, each in durations.items()}
    events = simulate(
        flushed, folded=False, seconds=lambda *key: seconds[key], send=send_delay(costs), afterwards=updates
    ).events  # fmt: skip
    ends = {event.action.micro: event.end for event in events[-1] if event.action.kind == "B"}
    begin, finish = (ends[step * micros - 1] for step in (steps - 1, steps))
    spans, held = [], []
    for each in events:
        whole = [span for timed in each for span in _spans_with_update(costs, delay, timed, durations)]
        held.append(sum((span.kind == "F" and span.end <= begin) - (span.kind == "B" and span.end <= begin) for span in whole))
        spans.append(
            [_span_in_window(span, begin, finish, (steps - 1) * micros) for span in whole if begin < span.end and span.start < finish]
        )
    return SimulatedSpans(spans, held, finish - begin)


def _ends_update(delay: Delay, micro: int, micros: int) -> bool:
    return delay.update_of(micro, micros) != delay.update_of(micro + 1, micros)


def _spans_with_update(costs: StepCosts, delay: Delay, timed: TimedAction, durations: Durations) -> list[StepSpan]:
    """A pass of a pipeline without a flush, the send of its result, and what follows it where it completes an update."""
    layout, action = costs.layout, timed.action
    spans = _pass_spans(costs, timed, durations)
    if action.kind == "B" and _ends_update(delay, action.micro, layout.micros):
        at = spans[-1].end
        for kind, seconds in _update_seconds(costs, delay, timed.stage):
            at = _append(spans, timed.stage, kind, at, seconds)
    return spans


def _update_seconds(costs: StepCosts, delay: Delay, stage: int) -> Sequence[tuple[SpanKind, float]]:
    """What follows the last backward of an update on a stage, and its seconds."""
    end, updates = costs.ends[stage], delay.updates(costs.layout.micros)
    tied = costs.tied / updates if stage in (0, costs.layout.mesh.pp - 1) else 0.0
    return (("sum", end.sums), ("tied", tied), ("step", end.step), ("gather", end.gather), ("host", costs.host / updates))


def _span_in_window(span: StepSpan, begin: float, end: float, first: int) -> StepSpan:
    """A span in a window, cut at both ends; its micro-batch counts from the window's step."""
    start, stop = max(span.start, begin), min(span.end, end)
    kept = (stop - start) / span.seconds if span.seconds else 1.0
    micro = span.micro - first if span.has_micro_batch else NONE
    return span._replace(start=start - begin, end=stop - begin, messages=span.messages * kept, micro=micro)


class PassDuration(NamedTuple):
    """Seconds of a pass: of computation, of messages inside it, and of the send of its result where that blocks its stage."""

    computing: float
    messages: float
    sending: float

    @property
    def total(self) -> float:
        """The seconds for which it keeps its stage busy."""
        return self.computing + self.messages + self.sending


Durations = Mapping[tuple[str, int], PassDuration]  # (kind, part) -> its duration


def pass_durations(costs: StepCosts, slowness: Slowness) -> Durations:
    """Return the duration of each kind of pass on each part of the model."""
    layout = costs.layout
    stage_of = {part: stage for stage in range(layout.mesh.pp) for part in layout.parts(stage)}
    found = {}
    for (kind, part), planned in costs.passes.items():
        sends = costs.send_blocks and _receiver(layout, kind, part) is not None
        found[kind, part] = PassDuration(
            planned.computing * slowness.get(stage_of[part], 1.0), planned.messages, costs.send if sends else 0.0
        )  # fmt: skip
    return found


def send_delay(costs: StepCosts) -> float:
    """Return the seconds between the end of a pass and the arrival of its result on another stage; 0 where its own stage waits for them."""
    return 0.0 if costs.send_blocks else costs.send


def _receiver(layout: Layout, kind: str, part: int) -> int | None:
    """The part of the model, on another stage, that takes the result of a pass through `part`; None: there is none, or it is not sent."""
    taker, stages, last = part + 1 if kind == "F" else part - 1, layout.mesh.pp, len(layout.partition.parts) - 1
    if kind == "W" or not 0 <= taker <= last:
        return None
    stage, other = (stage_and_chunk(each, stages, folded=layout.is_folded)[0] for each in (part, taker))
    return taker if stage != other else None


def _pass_spans(costs: StepCosts, timed: TimedAction, durations: Durations) -> list[StepSpan]:
    """A pass, and the send of its result where that blocks the stage."""
    layout = costs.layout
    stage, (kind, micro, chunk), start, _ = timed
    part = part_of(stage, chunk, layout.mesh.pp, folded=layout.is_folded)
    computing, messages, sending = durations[kind, part]
    spans = [StepSpan(stage, kind, start, start + computing + messages, messages, micro, part)]
    if sending:
        spans.append(StepSpan(stage, "send", spans[-1].end, spans[-1].end + sending, sending, micro, part))
    return spans


def _stage_timeline(costs: StepCosts, step: SimulatedSpans, stage: int) -> StageTimeline:
    """A stage's spans, and the causes of its idle time."""
    layout, spans = costs.layout, step.spans[stage]
    messages = sum(span.messages for span in spans)
    busy = sum(span.seconds for span in spans)
    last = max((at for at, span in enumerate(spans) if span.is_pass), default=0)
    gaps = [after.start - before.end for before, after in pairwise(spans)]
    return StageTimeline(
        index=stage,
        parts=costs.layers[stage],
        spans=tuple(spans),
        computing=busy - messages,
        messages=messages,
        filling=spans[0].start,
        waiting=sum(gaps[:last]),
        draining=sum(gaps[last:]) + step.seconds - spans[-1].end,
        in_flight=in_flight(layout, stage),
        held=step.held[stage],
        saved=costs.saved[stage],
    )


def _transfers(costs: StepCosts, spans: Sequence[Sequence[StepSpan]]) -> Iterator[Transfer]:
    """What stages send each other: the result of each forward to the next part of the model, of each backward to the one before."""
    layout = costs.layout
    for span in (span for each in spans for span in each if span.is_pass):
        part = _receiver(layout, span.kind, span.part)
        if part is not None:
            stage, _ = stage_and_chunk(part, layout.mesh.pp, folded=layout.is_folded)
            yield Transfer("F" if span.kind == "F" else "B", span.micro, part, span.stage, stage, span.end, span.end + costs.send)
