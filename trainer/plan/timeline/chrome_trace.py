"""A step as a Chrome trace, which ui.perfetto.dev and chrome://tracing show: a process for each stage, arrows for what stages send.

The format is the Trace Event Format: times in microseconds, complete events (X) that nest, counters (C), flows (s, f), names (M).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .step_costs import MessageRound, StepCosts
from .timeline import StageTimeline, StepSpan, Timeline, held_activations

GENERATOR = "distrain simulate"
PASSES, DATA = 0, 1  # threads of a stage
MOST_BLOCKS = 50_000  # slices of blocks inside passes; of more, passes are shown without their blocks
SPAN_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
    "send": "send",
    "sum": "sum of gradients, not hidden",
    "tied": "sum of tied weights",
    "step": "optimizer step",
    "gather": "gather of weights, not hidden",
    "host": "host between steps",
    "data": "reading data",
    "other": "host between actions",
}
Event = dict[str, Any]


def trace_document(timeline: Timeline, costs: StepCosts, name: str) -> dict[str, Any]:
    """Return the trace of a run's step as a JSON document."""
    return {
        "otherData": {
            "generator": GENERATOR,
            "run": name,
            "seconds": timeline.seconds,
            "planned": timeline.planned,
            "schedule": timeline.schedule,
        },
        "displayTimeUnit": "ms",
        "traceEvents": list(step_events(timeline, costs)),
    }


def step_events(timeline: Timeline, costs: StepCosts) -> Iterator[Event]:
    """The events of a simulated step; a stage's number is that of its process."""
    with_blocks = sum(len(costs.blocks[span.part]) for stage in timeline.stages for span in stage.spans if span.is_pass) <= MOST_BLOCKS
    for stage in timeline.stages:
        yield from stage_names(stage, has_data=bool(costs.rounds[stage.index]))
        for span in stage.spans:
            yield span_event(span)
            if with_blocks and span.is_pass:
                yield from _block_slices(span, costs)
        for message_round in costs.rounds[stage.index]:
            yield from _data_slices(stage, message_round, costs.shares)
        for at, held in held_activations(stage):
            yield {"ph": "C", "pid": stage.index, "ts": at * 1e6, "name": "activations", "args": {"bytes": round(held)}}
    yield from flow_events(timeline)


def stage_names(stage: StageTimeline, *, has_data: bool) -> Iterator[Event]:
    """The names and the order of a stage's process and its threads."""
    layers = ", ".join(f"{first}-{end - 1}" if end - first > 1 else f"{first}" for first, end in stage.parts if end > first)
    yield {"ph": "M", "pid": stage.index, "name": "process_name", "args": {"name": f"stage {stage.index}: layers {layers or 'none'}"}}
    yield {"ph": "M", "pid": stage.index, "name": "process_sort_index", "args": {"sort_index": stage.index}}
    yield {"ph": "M", "pid": stage.index, "tid": PASSES, "name": "thread_name", "args": {"name": "passes"}}
    if has_data:
        yield {"ph": "M", "pid": stage.index, "tid": DATA, "name": "thread_name", "args": {"name": "messages of the data axis"}}


def span_event(span: StepSpan) -> Event:
    """A span as an event of its stage's passes."""
    args: dict[str, Any] = {"messages_us": span.messages * 1e6} if span.messages else {}
    name = SPAN_NAMES[span.kind]
    if span.has_micro_batch:
        name = f"{name} {span.micro}"
        args |= {"micro_batch": span.micro, "part": span.part}
    return _complete_event(span.stage, PASSES, name, span.start, span.seconds, span.kind, args)


def _complete_event(stage: int, thread: int, name: str, start: float, seconds: float, category: str, args: dict[str, Any]) -> Event:
    return {
        "ph": "X",
        "pid": stage,
        "tid": thread,
        "name": name,
        "cat": category,
        "ts": start * 1e6,
        "dur": seconds * 1e6,
        "args": args,
    }


def _block_slices(span: StepSpan, costs: StepCosts) -> Iterator[Event]:
    """The blocks inside a pass, by their shares of its time; backward runs them in reverse."""
    blocks = costs.blocks[span.part]
    each = [(block.name, block.forward if span.kind == "F" else block.backward) for block in blocks]
    whole = sum(seconds for _, seconds in each)
    at = span.start
    for name, seconds in each if span.kind == "F" else reversed(each):
        length = span.seconds * seconds / whole if whole else 0.0
        yield _complete_event(span.stage, PASSES, name, at, length, "block", {})
        at += length


def _data_slices(stage: StageTimeline, sent: MessageRound, shares: Sequence[float]) -> Iterator[Event]:
    """A round of messages of the data axis: beside the pass that hides it, and after it for as long as it is exposed. A part of the model
    has its share of the rounds at every micro-batch."""
    for span in _hiding_passes(stage, sent):
        share = shares[span.part] if sent.is_repeated else 1.0
        end = span.end if sent.is_repeated else span.end + sent.exposed
        args = {"payload_bytes": sent.payload, "messages": round(sent.parts * share, 3), "exposed_us": sent.exposed * share * 1e6}
        start = max(0.0, end - sent.seconds * share)
        yield _complete_event(stage.index, DATA, sent.verb, start, end - start, "data", args)


def _hiding_passes(stage: StageTimeline, sent: MessageRound) -> list[StepSpan]:
    """The spans at whose end messages end, or, once an update, start to be exposed: passes, or the optimizer's step before a gather."""
    if sent.is_repeated:
        splits = any(span.kind == "W" for span in stage.spans)
        kind = "F" if sent.under_forward else "W" if splits else "B"
        return [span for span in stage.spans if span.kind == kind]
    if sent.verb == "all_gather":
        return [span for span in stage.spans if span.kind == "step"]
    last = [
        span for span, after in zip(stage.spans, (*stage.spans[1:], None), strict=True) if after and after.kind in ("sum", "tied", "step")
    ]
    return [span for span in last if span.is_pass or span.kind == "send"]


def flow_events(timeline: Timeline) -> Iterator[Event]:
    """An arrow for each message between stages, from the pass that made it to the one that takes it."""
    takers = {
        (span.kind == "F", span.micro, span.part): span
        for stage in timeline.stages
        for span in stage.spans
        if span.is_pass and span.kind != "W"
    }
    makers = {
        (span.stage, span.end): span for stage in timeline.stages for span in stage.spans if span.is_pass
    }  # fmt: skip
    for number, each in enumerate(timeline.transfers):
        taker, maker = takers.get((each.kind == "F", each.micro, each.part)), makers.get((each.sender, each.start))
        if taker is None or maker is None:
            continue  # cut off at an end of the step
        shared = {"name": "send", "cat": "send", "id": number, "tid": PASSES}
        yield {**shared, "ph": "s", "pid": each.sender, "ts": (maker.start + maker.end) / 2 * 1e6}
        yield {**shared, "ph": "f", "bp": "e", "pid": each.receiver, "ts": (taker.start + taker.end) / 2 * 1e6}
