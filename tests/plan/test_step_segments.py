"""A step cut into segments by cause: each second has one, and the rules are the same for a measured step and a simulated one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from distrain.tests.plan.test_timeline import EVERY_SCHEDULE, HIDDEN, pipeline
from distrain.trainer.plan.layout.schedules import SCHEDULES
from distrain.trainer.plan.timeline.compare_steps import StepComparison, measured_timeline
from distrain.trainer.plan.timeline.make_timeline import make_timeline
from distrain.trainer.plan.timeline.step_segments import (
    CAUSES,
    IDLE_CAUSES,
    Lane,
    SegmentedStep,
    path_seconds,
    segmented_step,
    simulated_lanes,
    stage_seconds,
)
from distrain.trainer.plan.timeline.timed_spans import NONE, TimedSpan

# Two stages, one micro-batch. Stage 0 computes 1 to 4; its result is under way until 5; stage 1 computes until 11; its gradient is there at
# 12, and stage 0 has its own at 15. Both sum a tied weight until 16, agree until 17, and step, stage 1 longer.
STAGE0 = (
    ("data", 0, NONE, 0.5, 0.8),
    ("receive", 0, 0, 0.8, 0.8),
    ("F", 0, 0, 1, 4),
    ("send", 0, 0, 4, 4.5),
    ("receive", 0, 0, 4.5, 12),
    ("B", 0, 0, 12, 15),
    ("tied", NONE, NONE, 15, 16),
    ("sync", NONE, NONE, 16, 17),
    ("step", NONE, NONE, 17, 18),
)
STAGE1 = (
    ("receive", 0, 1, 0, 5),
    ("F", 0, 1, 5, 7),
    ("B", 0, 1, 7, 11),
    ("send", 0, 1, 11, 11.5),
    ("tied", NONE, NONE, 11.5, 16),
    ("sync", NONE, NONE, 16, 17),
    ("step", NONE, NONE, 17, 19),
)
EXPECTED = [
    {"F": 3, "B": 3, "messages": 1, "sums": 2, "step": 1, "data": 0.3, "other": 0.7, "wait": 7, "drain": 1},
    {"F": 2, "B": 4, "messages": 1.5, "sums": 2, "step": 2, "fill": 4, "drain": 3.5},
]
# Back from stage 1's step: sums; stage 0's backward; the flight of what it waited for; stage 1's passes; the flight to it; stage 0's start.
PATH = {"F": 5, "B": 7, "messages": 2, "sums": 2, "step": 2, "data": 0.3, "other": 0.7}


def lane(stage: int, spans: tuple[tuple[str, int, int, float, float], ...], end: float, replica: int = 0) -> Lane:
    return Lane(stage=stage, replica=replica, start=0.0, end=end, spans=tuple(TimedSpan(*span) for span in spans))


@pytest.fixture
def measured() -> SegmentedStep:
    return segmented_step([lane(0, STAGE0, 18), lane(1, STAGE1, 19)], origin="measured")


def check_partition(step: SegmentedStep) -> None:
    for segments in step.segments:
        assert segments[0].start == 0
        assert segments[-1].end == pytest.approx(step.seconds)
        assert all(before.end == pytest.approx(after.start, abs=1e-12 * step.seconds) for before, after in pairwise(segments))
        assert all(each.end > each.start for each in segments)


def test_each_second_of_a_measured_step_has_its_cause(measured: SegmentedStep) -> None:
    check_partition(measured)
    found = stage_seconds(measured)
    assert [{cause: pytest.approx(each) for cause, each in stage.items() if each > 1e-9} for stage in found] == EXPECTED


def test_the_critical_path_goes_where_a_stage_was_waited_for(measured: SegmentedStep) -> None:
    found = path_seconds(measured)
    assert {cause: pytest.approx(each) for cause, each in found.items() if each > 1e-9} == PATH
    assert sum(found.values()) == pytest.approx(19)


def test_ranks_of_other_replicas_make_nothing_for_a_pass_but_join_what_all_do_together() -> None:
    """A second replica that is half a second late in all: its passes wait for its own stages, and the first one waits for its norm."""
    late = [
        lane(stage, tuple((kind, micro, part, start + 0.5, end + 0.5) for kind, micro, part, start, end in spans), end + 0.5, replica=1)
        for stage, spans, end in ((0, STAGE0, 18), (1, STAGE1, 19))
    ]
    step = segmented_step([lane(0, STAGE0, 18), lane(1, STAGE1, 19), *late], origin="measured")
    check_partition(step)
    waits = [
        [round(sum(each.seconds for each in segments if each.cause == cause), 9) for cause in ("wait", "fill")]
        for segments in step.segments
    ]
    assert waits == [[7, 0], [0, 4], [7, 0], [0, 4.5]]
    assert [each.seconds for each in step.segments[0] if each.cause == "drain"] == pytest.approx([0.5, 1.5])


def test_a_clock_that_is_behind_makes_no_wait_negative() -> None:
    """Stage 1 receives what stage 0 has, by another machine's clock, not yet computed."""
    early = tuple(
        (kind, micro, part, start - 3, end - 3) if start >= 5 else (kind, micro, part, 0, 2) for kind, micro, part, start, end in STAGE1
    )
    step = segmented_step([lane(0, STAGE0, 18), lane(1, early, 16)], origin="measured")
    check_partition(step)
    assert sum(path_seconds(step).values()) == pytest.approx(18)


def test_a_rank_without_passes_is_the_hosts() -> None:
    step = segmented_step([lane(0, (), 3)], origin="measured")
    assert [(each.cause, each.seconds) for each in step.segments[0]] == [("other", 3)]


@EVERY_SCHEDULE
@pytest.mark.parametrize("words", [(), (HIDDEN,)], ids=["blocking", "hidden"])
def test_a_simulated_step_is_cut_into_its_own_spans(name: str, chunks: int, words: tuple[str, ...]) -> None:
    if SCHEDULES[name].delay:
        pytest.skip("a timeline is of steps that flush")
    timeline = make_timeline(pipeline(name, chunks, *words))
    step = segmented_step(simulated_lanes(timeline), origin="simulated")
    check_partition(step)
    for stage, found in zip(timeline.stages, stage_seconds(step), strict=True):
        for kind in ("F", "B", "I", "W", "step"):
            assert found[kind] == pytest.approx(sum(span.seconds for span in stage.spans if span.kind == kind))
        assert found["sums"] == pytest.approx(sum(span.seconds for span in stage.spans if span.kind in ("sum", "tied", "gather")))
        idle = stage.filling + stage.waiting + stage.draining
        assert sum(found[cause] for cause in IDLE_CAUSES) + found["messages"] == pytest.approx(
            idle + sum(span.seconds for span in stage.spans if span.kind == "send")
        )
    path = path_seconds(step)
    assert sum(path.values()) == pytest.approx(timeline.seconds)
    assert sum(path[cause] for cause in IDLE_CAUSES) == pytest.approx(0, abs=1e-6 * timeline.seconds)


def test_a_step_beside_itself_differs_in_nothing_and_a_slow_action_is_found() -> None:
    timeline = make_timeline(pipeline("1f1b", 1, HIDDEN))
    simulated = segmented_step(simulated_lanes(timeline), origin="simulated")
    assert all(each.seconds == 0 for each in StepComparison(measured=simulated, simulated=simulated).actions())
    slow = make_timeline(pipeline("1f1b", 1, HIDDEN), {2: 1.5})
    comparison = StepComparison(measured=segmented_step(simulated_lanes(slow), origin="simulated"), simulated=simulated)
    first = comparison.actions()[0]
    assert (first.kind, first.stage, first.number) == ("B", 2, timeline.micros)
    assert first.seconds == pytest.approx(timeline.micros * (first.measured - first.simulated))
    assert first.measured > first.simulated
    assert sum(seconds for _, seconds in comparison.path_differences()) == pytest.approx(slow.seconds - timeline.seconds)
    drawn = measured_timeline(comparison.measured, timeline)
    assert drawn.seconds == slow.seconds
    for stage in drawn.stages:
        assert stage.computing + stage.messages + stage.filling + stage.waiting + stage.draining == pytest.approx(slow.seconds)


def test_messages_of_a_measured_step_are_drawn_from_the_end_of_a_pass_to_the_beginning_of_the_next() -> None:
    slow = make_timeline(pipeline("1f1b", 1, HIDDEN), {2: 1.5})
    drawn = measured_timeline(segmented_step(simulated_lanes(slow), origin="simulated"), make_timeline(pipeline("1f1b", 1, HIDDEN)))
    begins = {(span.kind, span.micro, span.part): span.start for stage in slow.stages for span in stage.spans if span.is_pass}
    assert len(drawn.transfers) == len(slow.transfers)
    for found, sent in zip(drawn.transfers, slow.transfers, strict=True):
        assert (found.kind, found.micro, found.part) == (sent.kind, sent.micro, sent.part)
        assert found.start == pytest.approx(sent.start)
        assert found.end == pytest.approx(begins[sent.kind, sent.micro, sent.part])
        assert found.end >= sent.end - 1e-9


def test_the_rank_that_computes_longest_beside_those_of_its_stage_is_named() -> None:
    ranks = [lane(0, (("F", 0, 0, 0, each), ("B", 0, 0, each, 2 * each)), 8, replica) for replica, each in enumerate((2, 2, 3, 2))]
    step = segmented_step(ranks, origin="measured")
    slow = StepComparison(measured=step, simulated=step).slow_rank()
    assert slow
    assert slow.lane == 2
    assert slow.times == pytest.approx(1.5)
    assert set(CAUSES) >= {each.cause for each in step.segments[0]}
