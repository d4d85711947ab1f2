"""The Chrome trace of a step: events that viewers accept, which nest, and which show the timeline."""

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from distrain.tests.plan.test_timeline import EVERY_SCHEDULE, STAGES, costs_of, pipeline, run_of
from distrain.trainer.plan.timeline.chrome_trace import trace_document
from distrain.trainer.plan.timeline.make_timeline import make_timeline
from distrain.trainer.plan.timeline.step_costs import StepCosts
from distrain.trainer.plan.timeline.timeline import Timeline, held_activations

FIELDS = {"X": {"name", "cat", "ts", "dur", "pid", "tid"}, "C": {"name", "ts", "pid", "args"}, "M": {"name", "pid", "args"}}
FIELDS |= {kind: {"name", "cat", "ts", "pid", "tid", "id"} for kind in "sf"}
Events = list[dict[str, Any]]


def trace_of(costs: StepCosts) -> tuple[Timeline, Events]:
    timeline = make_timeline(costs)
    events: Events = json.loads(json.dumps(trace_document(timeline, costs, "run")))["traceEvents"]
    return timeline, events


def slices(events: Events, *categories: str) -> Events:
    return [event for event in events if event["ph"] == "X" and (not categories or event["cat"] in categories)]


@EVERY_SCHEDULE
def test_events_have_the_fields_of_their_kind_and_slices_nest(name: str, chunks: int) -> None:
    timeline, events = trace_of(pipeline(name, chunks, "parallel.zero=1"))
    for event in events:
        assert FIELDS[event["ph"]] <= set(event)
    threads = defaultdict(list)
    for event in slices(events):
        assert event["ts"] >= -1e-3
        assert event["ts"] + event["dur"] <= timeline.seconds * 1e6 * (1 + 1e-9)
        threads[event["pid"], event["tid"], event["cat"] == "block"].append(event)
    for each in threads.values():  # slices of a kind follow each other: passes on their thread, blocks inside passes
        each.sort(key=lambda event: event["ts"])
        assert all(after["ts"] >= before["ts"] + before["dur"] - 1e-3 for before, after in pairwise(each))


def test_passes_are_the_timelines_spans_and_blocks_fill_them() -> None:
    costs = pipeline("zb_v", 1)
    timeline, events = trace_of(costs)
    spans = {(span.stage, span.start, span.seconds) for stage in timeline.stages for span in stage.spans}
    shown = {
        (event["pid"], event["ts"] / 1e6, event["dur"] / 1e6)
        for event in slices(events, *"FBIW", "send", "sum", "tied", "step", "gather", "host")
    }
    assert sorted(shown) == [tuple(pytest.approx(each) for each in span) for span in sorted(spans)]
    passes, blocks = slices(events, *"FBIW"), slices(events, "block")
    assert sum(event["dur"] for event in blocks) == pytest.approx(sum(event["dur"] for event in passes))
    forward = next(event for event in passes if event["pid"] == 0 and event["name"] == "forward 0" and event["args"]["part"] == 0)
    inside = [
        block["name"] for block in blocks if block["pid"] == 0 and forward["ts"] <= block["ts"] < forward["ts"] + forward["dur"] - 1e-6
    ]
    assert inside == ["embedding", *(f"layer {layer}" for layer in range(4))]
    last = next(event for event in passes if event["pid"] == 0 and event["name"] == "backward of inputs 0" and event["args"]["part"] == 7)
    inside = [block["name"] for block in blocks if block["pid"] == 0 and last["ts"] <= block["ts"] < last["ts"] + last["dur"] - 1e-6]
    assert inside == ["head", *(f"layer {layer}" for layer in (31, 30, 29, 28))]
    head, layer = (next(block for block in costs.blocks[7] if block.name == name) for name in ("head", "layer 31"))
    assert head.backward / layer.backward != pytest.approx(head.forward / layer.forward, rel=1e-3)
    lengths = {
        block["name"]: block["dur"] for block in blocks if block["pid"] == 0 and last["ts"] <= block["ts"] < last["ts"] + last["dur"] - 1e-6
    }
    assert lengths["head"] / lengths["layer 31"] == pytest.approx(head.backward / layer.backward)


def test_an_arrow_leaves_a_pass_and_reaches_the_one_that_takes_its_result() -> None:
    timeline, events = trace_of(pipeline("interleaved", 2))
    leaves, reaches = ({event["id"]: event for event in events if event["ph"] == kind} for kind in "sf")
    assert leaves.keys() == reaches.keys()
    assert len(leaves) == len(timeline.transfers)
    passes = slices(events, *"FBIW")

    def pass_at(event: dict[str, Any]) -> tuple[str, int]:
        found = [each for each in passes if each["pid"] == event["pid"] and each["ts"] <= event["ts"] <= each["ts"] + each["dur"]]
        return found[0]["cat"], found[0]["args"]["micro_batch"]

    for number, leaving in leaves.items():
        assert pass_at(leaving) == pass_at(reaches[number])
        assert leaving["ts"] < reaches[number]["ts"]
        assert leaving["pid"] != reaches[number]["pid"]


def test_counters_are_the_activations_held() -> None:
    timeline, events = trace_of(pipeline("1f1b", 1))
    for stage in timeline.stages:
        shown = [(event["ts"] / 1e6, event["args"]["bytes"]) for event in events if event["ph"] == "C" and event["pid"] == stage.index]
        assert shown == [(pytest.approx(at), round(held)) for at, held in held_activations(stage)]


@pytest.mark.parametrize("zero", [1, 3])
def test_data_messages_lie_beside_the_passes_that_hide_them(zero: int) -> None:
    costs = costs_of(run_of("llama3_8b", f"parallel.zero={zero}"))
    timeline, events = trace_of(costs)
    shown, rounds = slices(events, "data"), costs.rounds[0]
    assert rounds
    for message_round in rounds:
        mine = [event for event in shown if (event["name"], event["args"]["payload_bytes"]) == (message_round.verb, message_round.payload)]
        assert len(mine) >= (timeline.micros if message_round.is_repeated else 1)
        assert max(event["dur"] for event in mine) == pytest.approx(1e6 * message_round.seconds, rel=1e-6)


@pytest.mark.parametrize("name", ["interleaved", "zb_v", "1f1b"])
def test_rounds_at_every_micro_batch_are_shown_once_for_each_stage(name: str) -> None:
    costs = pipeline(name, 2 if name == "interleaved" else 1, "parallel.zero=2")
    timeline, events = trace_of(costs)
    for stage, rounds in zip(timeline.stages, costs.rounds, strict=True):
        for each in (each for each in rounds if each.is_repeated):
            shown = [event for event in slices(events, "data") if (event["pid"], event["name"]) == (stage.index, each.verb)]
            assert sum(event["dur"] for event in shown) == pytest.approx(1e6 * timeline.micros * each.seconds, rel=0.02)
            assert sum(event["args"]["messages"] for event in shown) == pytest.approx(timeline.micros * each.parts)
            assert sum(event["args"]["exposed_us"] for event in shown) == pytest.approx(1e6 * timeline.micros * each.exposed)


def test_a_sum_of_gradients_ends_as_much_after_the_last_pass_as_it_is_exposed() -> None:
    costs = pipeline("1f1b", 1, "parallel.zero=1", "engine=pipe")
    timeline, events = trace_of(costs)
    for stage, rounds in zip(timeline.stages, costs.rounds, strict=True):
        (summed,) = (message_round for message_round in rounds if message_round.verb != "all_gather")
        assert summed.exposed > 0
        (shown,) = (event for event in slices(events, "data") if (event["pid"], event["name"]) == (stage.index, summed.verb))
        last = max(span.end for span in stage.spans if span.is_pass or span.kind == "send")
        assert shown["ts"] + shown["dur"] == pytest.approx(1e6 * (last + summed.exposed))
        assert shown["dur"] == pytest.approx(1e6 * summed.seconds)


def test_stages_are_named_by_their_layers_and_one_without_messages_has_no_lane_for_them() -> None:
    _, events = trace_of(pipeline("1f1b", 1))
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [f"stage {stage}: layers {8 * stage}-{8 * stage + 7}" for stage in range(STAGES)]
    _, alone = trace_of(costs_of(run_of("gpt2_124m_1gpu")))
    assert [event["args"]["name"] for event in alone if event["name"] == "thread_name"] == ["passes"]
