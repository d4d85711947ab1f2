"""A plan whose step is simulated: the parts' own seconds and messages, beside the rows' closed forms."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.action_orders import Lists, Pipeline, action_orders
from distrain.trainer.plan.layout.action_csv import write_action_csv
from distrain.trainer.plan.layout.schedules import SCHEDULES
from distrain.trainer.plan.layout.simulate import simulate
from distrain.trainer.plan.plan import make_plan

MICROS = 16
KEYS = ("parallel.zero=1", "parallel.pp=4", "train.microbatch=1", f"train.batch={2 * MICROS}", "engine=native")


def step_and_peak(*words: str) -> tuple[float, int]:
    """(seconds of a step, bytes of the fullest device) of a layout of four stages."""
    plan = make_plan(load_recipe("llama3_8b_1node", [*KEYS, *words]))
    assert plan.time is not None
    assert plan.memory is not None
    return plan.time.step, plan.memory.peak


@pytest.mark.parametrize(("name", "chunks", "close"), [("1f1b", 1, 1e-9), ("gpipe", 1, 1e-9), ("interleaved", 2, 1.5e-3)])
def test_a_file_of_a_rows_actions_takes_the_planned_time_and_memory_of_the_row(
    name: str, chunks: int, close: float, tmp_path: Path
) -> None:
    """Chunks are not even: the first and the last also have an end of the model."""
    file, row = tmp_path / "mine.csv", SCHEDULES[name]
    file.write_text(write_action_csv([row.actions(stage, 4, MICROS, chunks) for stage in range(4)], folded=False))
    step, peak = step_and_peak(f"parallel.schedule={name}", f"parallel.chunks={chunks}")
    simulated, held = step_and_peak(f"parallel.schedule={file}", f"parallel.chunks={chunks}")
    assert simulated == pytest.approx(step, rel=close)
    assert held == peak


@settings(max_examples=20, phases=[Phase.generate])
@given(action_orders(Pipeline(4, 4, 1, False)))
def test_any_legal_order_is_planned_with_the_micro_batches_that_its_stages_hold(lists: Lists) -> None:
    run = load_recipe("llama3_8b_1node", [*KEYS, "train.batch=8"])
    plain = make_plan(run)
    text = write_action_csv(lists, folded=False)
    plan = make_plan(replace(run, parallel=replace(run.parallel, schedule="drawn.csv", actions=text)))
    assert plan.problems == ()
    assert plain.memory is not None
    assert plan.memory is not None
    assert plan.time is not None
    held = simulate(lists, folded=False, seconds=lambda kind, part: 1.0).peak
    rows = list(zip(plan.memory.stages, plain.memory.stages, strict=True))[:-1]  # the last stage holds an end of the model too
    for stage, (planned, one_f_one_b) in enumerate(rows):
        most, each = planned.bytes.activations * (4 - stage), one_f_one_b.bytes.activations
        if any(action.kind == "W" for action in lists[stage]):  # between I and W what products hold is kept, not all activations
            saved = max(accumulate((action.kind == "F") - (action.kind in "BI") for action in lists[stage]))
            assert most >= each * saved * (1 - 1e-6)
        else:
            assert most == pytest.approx(each * held[stage], rel=1e-6)
    assert plan.time.bubble > 0  # the first stage waits for the others, whatever the order


def test_layers_given_as_they_are_balanced_change_nothing() -> None:
    step, peak = step_and_peak()
    given, held = step_and_peak("parallel.stages=[8,8,8,8]")
    assert given == pytest.approx(step, rel=1e-9)
    assert held == peak
    assert step_and_peak("parallel.stages=[7,8,8,9]")[0] > step


def test_weight_gradients_apart_shorten_a_step() -> None:
    assert step_and_peak("parallel.schedule=zb_h1")[0] < step_and_peak("parallel.schedule=1f1b")[0]
