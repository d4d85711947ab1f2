"""The plan of a run that ramps its batch up: each level is planned as a run of that batch, and the whole run is their sum."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distrain.cli.config.load import load_recipe
from distrain.cli.pages.whole_run_facts import rampup_text
from distrain.tests.fakes.valid_run import BASE, Keys, fixed_run
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import Plan
from distrain.trainer.plan.search.search_result import find_layouts
from distrain.trainer.prove.trials.layouts import all_layouts, run_in_layout
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.derived.batch_levels import run_at_batch
from distrain.trainer.spec.run import Run

RAMP: Keys = {"train.rampup.batch": 64, "train.rampup.until": 10e6, "train.rampup.by": 64}
# fmt: off
LAYOUTS: list[Keys] = [
    {},
    {"parallel.pp": 4, "parallel.zero": 1},
    {"parallel.pp": 4, "parallel.schedule": "interleaved", "parallel.chunks": 3, "train.microbatch": 1},
    {"parallel.pp": 2, "parallel.schedule": "dualpipev", "train.microbatch": 1},
    {"parallel.pp": 4, "model.layers": 13, "parallel.schedule": "gpipe"},
    {"engine": "zero", "parallel.zero": 2, "parallel.tp": 2},
    {"engine": "pipe", "parallel.pp": 2},
    {"parallel.zero": 3, "parallel.gather": "micro"},
    {"parallel.sync.every": 4},
]
# fmt: on


def ramped(keys: Keys) -> tuple[Run, Plan]:
    run = with_changes(BASE, [*keys.items(), *RAMP.items()])
    return run, make_plan(run)


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_a_level_is_planned_as_a_run_of_its_batch(keys: Keys) -> None:
    run, plan = ramped(keys)
    assert plan.ok, plan.problems
    assert plan.run is not None
    assert plan.memory is not None
    assert [each.batch for each in plan.run.levels] == [64, 128, 192, 256]
    for level in plan.run.levels:
        alone = make_plan(run_at_batch(run, level.batch))
        assert alone.time is not None
        assert alone.memory is not None
        assert level.step == pytest.approx(alone.time.step)
        assert level.microbatches == alone.microbatches
        assert alone.memory.peak <= plan.memory.peak, "fewer micro-batches hold no more"


def test_the_whole_run_is_the_sum_of_its_levels() -> None:
    run, plan = ramped({"parallel.pp": 4})
    constant = make_plan(run_at_batch(run, 256))
    assert plan.run is not None
    assert plan.throughput is not None
    levels, known = plan.run.levels, [each.step or 0.0 for each in plan.run.levels]
    assert (plan.memory, plan.time, plan.throughput, plan.microbatches) == (
        constant.memory, constant.time, constant.throughput, constant.microbatches,
    )  # fmt: skip
    assert [each.steps for each in levels] == [51, 26, 17, 6]  # a third of 10e6 tokens on each, up to whole steps of 64, 128 and 192 x 1024
    assert plan.run.steps == 100
    assert plan.run.tokens == sum(each.tokens for each in levels) == 1024 * (51 * 64 + 26 * 128 + 17 * 192 + 6 * 256)
    assert plan.run.seconds == pytest.approx(sum(each.steps * step for each, step in zip(levels, known, strict=True)))
    assert constant.run is not None
    assert constant.run.levels == ()
    assert constant.run.mfu == pytest.approx(plan.throughput.mfu)
    assert plan.run.mfu is not None
    share = plan.run.tokens / plan.run.seconds / plan.throughput.tokens_per_second  # type: ignore[operator]
    assert plan.run.mfu == pytest.approx(plan.throughput.mfu * share)
    assert share < 0.9, "the bubble of few micro-batches is larger"


def test_a_run_of_so_many_tokens_takes_more_steps_with_a_ramp_up() -> None:
    run, plan = ramped({"train.steps": None, "train.tokens": 20e6})
    assert plan.run is not None
    assert plan.run.steps == 51 + 26 + 17 + 38
    assert plan.run.tokens >= 20e6 > plan.run.tokens - 256 * 1024
    (problem,) = make_plan(replace(run, optim=replace(run.optim, warmup=132))).problems
    assert str(problem).startswith("optim.warmup=132 is not shorter than the 132 steps of train.tokens=2e+07: ")
    assert make_plan(replace(run, optim=replace(run.optim, warmup=131))).ok


def test_a_plan_says_how_the_batch_grows() -> None:
    _, plan = ramped({"cluster.device.peak": {}})
    assert rampup_text(plan) == (
        "the batch grows: 64 sequences in 51 steps, 128 sequences in 26 steps, 192 sequences in 17 steps, 256 sequences in 6 steps"
    )
    run = load_recipe("gpt3_175b", ["train.rampup.batch=32", "train.rampup.by=32", "train.rampup.until=10e9"])
    text = rampup_text(make_plan(run))
    assert text.startswith("the batch grows: 32 sequences in 3,247 steps of ")
    assert ", 46 batches between, 1,536 sequences in 92,189 steps of " in text
    assert "; MFU over the run " in text
    assert rampup_text(make_plan(BASE)) == ""


def test_a_search_finds_layouts_that_train_every_level() -> None:
    run = with_changes(BASE, [*RAMP.items(), ("train.rampup.batch", 16), ("train.rampup.by", 80)])
    answer = find_layouts(run)
    assert answer.rows
    for found in answer.rows:
        assert 16 % (found.mesh["dp"] * found.microbatch) == 0
        planned = make_plan(fixed_run(run, found.overrides))
        assert planned.ok
        assert planned.run is not None
        assert found.days == pytest.approx(planned.run.days)


def test_layouts_of_a_proof_have_micro_batches_that_divide_every_batch() -> None:
    """10 and 12 sequences: a pipeline's micro-batch of 4 divides the second alone."""
    words = ("model=tiny", "data=synthetic", "device=cpu", "train.precision=fp32", "train.seq=16", "train.microbatch=1", "cluster.gpus=1")
    run = load_recipe("quickstart", [*words, "train.batch=12", "train.rampup.batch=10", "train.rampup.until=1e3"])
    layouts = [each for each in all_layouts(2, experts=False) if each.dp * each.pp == 2 and not each.is_delayed]
    planned = {each.name: make_plan(run_in_layout(run, each)) for each in layouts}
    assert planned
    assert {name: list(map(str, plan.problems)) for name, plan in planned.items() if plan.problems} == {}
