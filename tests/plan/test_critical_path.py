"""The critical path of a step: unbroken, as long as the step, and on what slows it."""

from itertools import pairwise
from random import Random

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.plan.test_timeline import EVERY_SCHEDULE, STAGES, costs_of, pipeline
from distrain.trainer.plan.timeline.critical_path import CriticalPath, critical_path, slowest_stage
from distrain.trainer.plan.timeline.make_timeline import make_timeline
from distrain.trainer.plan.timeline.step_costs import StepCosts
from distrain.trainer.plan.timeline.timeline import Timeline


def check_path(costs: StepCosts, timeline: Timeline, path: CriticalPath) -> None:
    close = 1e-9 * timeline.seconds
    assert path.pieces[0].span.start <= close
    assert path.pieces[-1].span.end == pytest.approx(timeline.seconds, rel=1e-12)
    for before, after in pairwise(path.pieces):
        assert after.span.start == pytest.approx(before.span.end + after.sent, abs=close)
        assert after.sent in (0.0, pytest.approx(costs.send, abs=close))
    sends = sum(piece.sent + piece.span.seconds * (piece.span.kind == "send") for piece in path.pieces)
    assert path.by_cause["sends"] == pytest.approx(sends, abs=close)
    assert not costs.send_blocks or not any(piece.sent for piece in path.pieces)  # the send is a span of its own
    assert sum(path.by_cause.values()) == pytest.approx(timeline.seconds, rel=1e-9)
    assert sum(path.by_stage.values()) + sum(piece.sent for piece in path.pieces) == pytest.approx(timeline.seconds, rel=1e-9)


@EVERY_SCHEDULE
@pytest.mark.parametrize("zero", [1, 3])
def test_a_path_is_unbroken_and_as_long_as_the_step(name: str, chunks: int, zero: int) -> None:
    costs, random = pipeline(name, chunks, f"parallel.zero={zero}"), Random(f"{name} {chunks} {zero}")
    for slowness in ({}, {stage: random.uniform(0.5, 3) for stage in range(STAGES)}):
        timeline = make_timeline(costs, slowness)
        check_path(costs, timeline, critical_path(timeline))


@pytest.mark.parametrize("slow", range(STAGES))
def test_a_slow_stage_has_most_of_the_path(slow: int) -> None:
    path = critical_path(make_timeline(pipeline("1f1b", 1), {slow: 2.0}))
    assert slowest_stage(path) == slow
    assert path.by_stage[slow] > 0.5 * sum(path.by_stage.values())


@EVERY_SCHEDULE
def test_a_step_is_shorter_where_the_stage_with_most_of_the_path_is_faster(name: str, chunks: int) -> None:
    costs = pipeline(name, chunks)
    timeline = make_timeline(costs)
    path = critical_path(timeline)
    faster = make_timeline(costs, {slowest_stage(path): 0.99})
    assert faster.seconds < timeline.seconds


def test_a_step_without_a_pipeline_is_its_own_path() -> None:
    timeline = make_timeline(costs_of(load_recipe("llama3_8b", ())))
    path = critical_path(timeline)
    assert [piece.span for piece in path.pieces] == list(timeline.stages[0].spans)
    assert path.by_cause["sends"] == 0
    assert path.by_cause["messages"] == pytest.approx(timeline.stages[0].messages)


def test_spans_too_short_to_tell_apart_end_the_path() -> None:
    """The optimizer's steps of two stages may each end, to rounding, where the other starts."""
    costs = pipeline("1f1b", 1)
    short = tuple(end._replace(step=1e-13 * (1 + stage)) for stage, end in enumerate(costs.ends))
    timeline = make_timeline(costs._replace(ends=short, host=0.0))
    path = critical_path(timeline)
    assert len(path.pieces) < 100
    assert sum(path.by_cause.values()) == pytest.approx(timeline.seconds)
