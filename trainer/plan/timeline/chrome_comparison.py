"""A measured step beside the simulated one as a Chrome trace: two groups of processes, each with one for every stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .chrome_trace import PASSES, Event, flow_events, span_event, stage_names, step_events
from .compare_steps import StepComparison, lane_spans
from .step_costs import StepCosts
from .timeline import Timeline, held_activations

GENERATOR = "distrain report --timeline"


def comparison_document(
    comparison: StepComparison, drawn: Timeline, simulated: Timeline, costs: StepCosts, name: str, step: int, ranks: Sequence[int]
) -> dict[str, Any]:
    """Return the trace of a measured step, `drawn` of its first replica, and of the simulated one as a JSON document; `ranks` are those of
    the measured lanes."""
    measured = list(_measured_events(comparison, drawn, ranks))
    others = step_events(simulated, costs)
    shift = len(drawn.stages)
    flows = 1 + max((event["id"] for event in measured if "id" in event), default=0)
    return {
        "otherData": {
            "generator": GENERATOR,
            "run": name,
            "step": step,
            "measured": comparison.measured.seconds,
            "simulated": comparison.simulated.seconds,
            "planned": simulated.planned,
        },
        "displayTimeUnit": "ms",
        "traceEvents": [
            *(_in_group(event, "measured", 0, 0) for event in measured),
            *(_in_group(event, "simulated", shift, flows) for event in others),
        ],
    }


def _measured_events(comparison: StepComparison, drawn: Timeline, ranks: Sequence[int]) -> Iterator[Event]:
    """The events of all ranks, each a thread of its stage's process; flows and activations are of the first replica."""
    for stage in drawn.stages:
        yield from (event for event in stage_names(stage, has_data=False) if event["name"] != "thread_name")
        for at, held in held_activations(stage):
            yield {"ph": "C", "pid": stage.index, "ts": at * 1e6, "name": "activations", "args": {"bytes": round(held)}}
    for number, rank in enumerate(ranks):
        lane = comparison.measured.lanes[number]
        thread = PASSES + lane.replica
        yield {"ph": "M", "pid": lane.stage, "tid": thread, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        for span in lane_spans(comparison.measured, number):
            yield {**span_event(span), "tid": thread}
    yield from flow_events(drawn)


def _in_group(event: Event, group: str, shift: int, flows: int) -> Event:
    """An event in a group of processes, whose numbers and flows begin there."""
    moved = {**event, "pid": event["pid"] + shift}
    if "id" in event:
        moved["id"] = event["id"] + flows
    if event["name"] == "process_name":
        moved["args"] = {"name": f"{group} {event['args']['name']}"}
    elif event["name"] == "process_sort_index":
        moved["args"] = {"sort_index": event["args"]["sort_index"] + shift}
    return moved
