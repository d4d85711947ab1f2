"""Pipelines without a flush: their actions go on from step to step, a stage has the weights that its micro-batches meet, and no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrain.tests.fakes.planned_memory import gpt, memory_of, run_of
from distrain.trainer.plan.layout.actions_without_flush import flush_actions, step_actions
from distrain.trainer.plan.layout.schedule_of_run import VERTICAL_PIPEDREAM
from distrain.trainer.plan.layout.schedules import SCHEDULES, Action, Schedule, one_f_one_b, peak_in_flight
from distrain.trainer.plan.layout.update_delay import Delay
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.changed_run import with_changes

ROWS = {"pipedream": SCHEDULES["pipedream"], "vertical": VERTICAL_PIPEDREAM, "pipedream_2bw": SCHEDULES["pipedream_2bw"]}


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5))
def test_steps_and_a_flush_are_the_actions_of_one_long_step(stages: int, micros: int, steps: int) -> None:
    for stage in range(stages):
        actions = [action for step in range(steps) for action in step_actions(stage, stages, step * micros, (step + 1) * micros)]
        assert actions + flush_actions(stage, stages, steps * micros) == one_f_one_b(stage, stages, steps * micros)


def states(delay: Delay, stage: int, stages: int, micros: int, steps: int) -> Iterator[tuple[Action, int, set[int]]]:
    """Yield each action of a stage with the version that it meets, and the versions that this and later actions of steps under way meet, or
    that have been made."""
    actions, updates, met = one_f_one_b(stage, stages, steps * micros), 0, dict[int, int]()
    for action in actions:
        if action.kind == "F":
            met[action.micro] = delay.version(stage, stages, action.micro, micros)
        oldest = min(met.values())
        yield action, met[action.micro], set(range(oldest, updates + 1))
        if action.kind == "B":
            del met[action.micro]
            updates += delay.update_of(action.micro + 1, micros) > delay.update_of(action.micro, micros)


def pipelines() -> list[tuple[str, int, int]]:
    return [
        (name, stages, micros) for name in ROWS for stages in range(2, 7) for micros in range(1, 9) if name[-1] != "w" or micros >= stages
    ]


@pytest.mark.parametrize("name", ROWS)
def test_a_stage_has_each_version_when_a_micro_batch_meets_it_and_holds_as_many_as_planned(name: str) -> None:
    delay = delay_of_row(ROWS[name])
    for stages, micros in ((stages, micros) for row, stages, micros in pipelines() if row == name):
        for stage in range(stages):
            rows = list(states(delay, stage, stages, micros, steps=3 + 12 // micros))
            assert all(version in held for _, version, held in rows), (stages, micros, stage)
            assert max(len(held) for *_, held in rows) == delay.versions_held(stage, stages), (stages, micros, stage)


def test_versions_are_those_of_the_papers() -> None:
    """PipeDream: stage s keeps p - s, with vertical sync all keep p; 2BW: two (arXiv:2006.09503 section 3.1)."""
    held = {name: [delay_of_row(row).versions_held(stage, 4) for stage in range(4)] for name, row in ROWS.items()}
    assert held == {"pipedream": [4, 3, 2, 1], "vertical": [4, 4, 4, 4], "pipedream_2bw": [2, 2, 2, 2]}


@pytest.mark.parametrize(
    ("schedule", "vertical", "versions"),
    [("pipedream", False, [4, 3, 2, 1]), ("pipedream", True, [4, 4, 4, 4]), ("pipedream_2bw", False, [2, 2, 2, 2])],
)
def test_a_plan_counts_the_weights_of_each_version(schedule: str, vertical: bool, versions: list[int]) -> None:
    keys = {"parallel__pp": 4, "train__batch": 8, "train__precision": "fp32"}
    run = run_of(gpt(8, 64, 4, tied=False), 4, **keys, parallel__schedule=schedule, parallel__vertical=vertical)
    assert [each.bytes.weights for each in memory_of(run).stages] == [
        many * 4 * each.parameters for many, each in zip(versions, memory_of(run).stages, strict=True)
    ]


def test_with_vertical_sync_a_micro_batch_meets_one_version_on_every_stage() -> None:
    delay, first = delay_of_row(VERTICAL_PIPEDREAM), delay_of_row(SCHEDULES["pipedream"])
    for micro in range(12):
        assert {delay.version(stage, 4, micro, 3) for stage in range(4)} == {first.version(0, 4, micro, 3)}


def delay_of_row(row: Schedule) -> Delay:
    assert row.delay is not None
    return row.delay


@pytest.mark.parametrize(("name", "late"), [("pipedream", 3), ("vertical", 3), ("pipedream_2bw", 1)])
def test_two_steps_of_few_micro_batches_are_late(name: str, late: int) -> None:
    """A step's last update on stage 0 comes p - 1 micro-batches after its last forward."""
    delay = delay_of_row(ROWS[name])
    assert max(delay.late(stage, 4) for stage in range(4)) == late
    assert [delay.steps_late(4, micros) for micros in (1, 2, 3, 4)] == [3, 2, 1, 1]


@given(st.integers(2, 6), st.integers(1, 8))
def test_as_many_micro_batches_are_in_flight_as_the_continued_actions_have(stages: int, micros: int) -> None:
    """Fewer micro-batches a step than stages leave none out: those of the next steps follow."""
    run = run_of(gpt(6, 64, 4), stages, parallel__pp=stages, parallel__schedule="pipedream", train__batch=micros)
    for stage in memory_of(run).stages:
        actions = [each for step in range(12) for each in step_actions(stage.index, stages, step * micros, (step + 1) * micros)]
        assert stage.in_flight == peak_in_flight(actions)


def test_data_messages_travel_at_each_update() -> None:
    """Of 8 micro-batches: eight times as often as in 1F1B, and once under 2BW."""

    def sent_counts(schedule: str, zero: int) -> dict[str, int]:
        keys = {"parallel__pp": 2, "parallel__dp": 2, "parallel__zero": zero, "train__batch": 16, "parallel__schedule": schedule}
        run = with_changes(run_of(gpt(4, 64, 4, tied=False), 4, **keys, train__precision="fp32"), [("engine", "native")])
        return {each.verb: each.sent for each in make_plan(run).traffic if each.axis == "dp"}

    for zero in (0, 1):
        once = sent_counts("1f1b", zero)
        assert sent_counts("pipedream", zero) == {verb: 8 * many for verb, many in once.items()}
        assert sent_counts("pipedream_2bw", zero) == once


def test_a_clip_is_said_to_be_each_stages_own() -> None:
    run = run_of(gpt(4, 64, 4, tied=False), 2, parallel__pp=2, parallel__schedule="pipedream", train__batch=4, train__clip=0.5)
    says = [str(each) for each in make_plan(run).warnings if each.rule == "clip"]
    assert says == ["train.clip=0.5 clips each stage by its own norm under parallel.schedule=pipedream"]
