"""The best interval between checkpoints, against figures computed by hand and published for real runs."""

from __future__ import annotations

from dataclasses import replace
from math import exp, sqrt
from typing import Any

import pytest

from distrain.cli.app import command
from distrain.cli.config.load import load_recipe
from distrain.cli.pages.plan_page import plan_text
from distrain.cli.pages.text_layout import Style
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.result import Plan, Saving
from distrain.trainer.plan.save_interval import best_interval, goodput, stop_seconds

HOUR, DAY = 3600.0, 86400.0


def llama(*words: str) -> Plan:
    return make_plan(load_recipe("llama3_405b", list(words)))


def saving(plan: Plan) -> Saving:
    assert plan.saving is not None
    return plan.saving


def saving_warnings(plan: Plan) -> list[str]:
    return [str(each) for each in plan.warnings if each.rule == "saving"]


def test_llama_3_was_interrupted_as_often_as_the_default_mtbf_says() -> None:
    """arXiv:2407.21783 table 5: 419 unexpected interruptions in 54 days on 16,384 GPUs, one in 3.1 hours."""
    found = saving(llama("cluster.nodes=2048", "parallel.dp=128"))
    assert found.mtbf == pytest.approx(54 * DAY / 419)
    assert found.mtbf / HOUR == pytest.approx(3.09, abs=0.005)


@pytest.mark.parametrize(
    ("save", "between", "interval"),
    [
        # sqrt(2 x 60 x 10800) = 1138.420; d / 2M = 1 / 360, its root 0.0527046; x (1 + 0.0175682 + 0.0003086) = 1158.771; - 60
        (60.0, 10800.0, 1098.771),
        # sqrt(2 x 5 x 1000) = 100; d / 2M = 0.0025, its root 0.05; x (1 + 0.0166667 + 0.0002778) = 101.69444; - 5
        (5.0, 1000.0, 96.69444),
        (1000.0, 400.0, 400.0),  # a save that takes longer than twice the time between faults
    ],
)
def test_the_best_interval_is_dalys(save: float, between: float, interval: float) -> None:
    assert best_interval(save, between) == pytest.approx(interval, abs=5e-4)


def test_the_interval_of_a_short_save_is_youngs() -> None:
    assert best_interval(1e-6, 1e4) == pytest.approx(sqrt(2e-2), rel=1e-4)


def test_goodput_is_dalys() -> None:
    """100 / (1000 e^0.005 (e^0.105 - 1)): e^0.005 = 1.0050125, e^0.105 = 1.1107106; 100 / 111.26553 = 0.898751."""
    assert goodput(100.0, 5.0, 1000.0) == pytest.approx(0.898751, abs=1e-6)


@pytest.mark.parametrize(("save", "between"), [(1.0, 1e3), (30.0, 1e4), (300.0, 1e4), (60.0, 600.0)])
def test_no_interval_keeps_more_than_the_best(save: float, between: float) -> None:
    best = goodput(best_interval(save, between), save, between)
    assert all(goodput(factor * best_interval(save, between), save, between) <= best + 1e-4 for factor in (0.25, 0.5, 0.8, 1.25, 2, 4))
    assert goodput(1e9, save, between) == 0.0


def test_a_plan_tells_the_best_interval() -> None:
    """4.43 TiB over 2e12 bytes/s; one fault in 54 days x 16384 / (419 x 8192); Daly's interval in steps."""
    plan = llama()
    found = saving(plan)
    assert plan.run is not None
    assert plan.time is not None
    assert plan.run.seconds is not None
    save, between = plan.run.checkpoint_bytes / 2e12, 108 * DAY / 419
    assert found.seconds == save == pytest.approx(12 * 405.9e9 / 2e12, rel=1e-3)
    assert found.mtbf == pytest.approx(between)
    assert found.interruptions == pytest.approx(plan.run.seconds / between)
    assert found.interval == pytest.approx(sqrt(2 * save * between) - save, rel=0.005)
    assert found.interval is not None
    assert found.every == round(found.interval / plan.time.step)
    step = found.every * plan.time.step
    assert found.goodput == pytest.approx(step / (between * exp(save / between) * (exp((step + save) / between) - 1)))
    assert f"checkpoint.every={found.every})" in " ".join(plan_text(plan, Style()).split())


def test_without_cluster_storage_no_interval_is_planned() -> None:
    plan = llama("cluster.storage=null")
    found = saving(plan)
    assert (found.seconds, found.interval, found.every, found.goodput) == (None, None, None, None)
    assert "set cluster.storage (bytes/s) to see how often to save" in " ".join(plan_text(plan, Style()).split())


def test_a_run_too_short_to_be_interrupted_is_not_warned() -> None:
    plan = make_plan(load_recipe("gpt2_124m", ["cluster.storage=1e9"]))
    assert saving(plan).interruptions is not None
    assert "interrupt" not in plan_text(plan, Style())
    assert saving_warnings(plan) == []


def test_an_interval_far_from_the_best_is_warned_of_and_its_fix_works() -> None:
    (line,) = saving_warnings(llama("checkpoint.every=1000"))
    assert line == (
        "about 663 interruptions are expected: checkpoint.every=1000 keeps 69 % of the time, the best interval 99 %: "
        "set checkpoint.every=21"
    )
    assert saving_warnings(llama()) == []
    assert saving_warnings(llama("checkpoint.every=30")) == []  # flat near the best


def test_a_long_run_that_saves_only_at_its_end_is_warned() -> None:
    (line,) = saving_warnings(llama("checkpoint.every=0", "cluster.storage=null"))
    assert line == (
        "checkpoint.every=0 saves only at the end, and about 663 interruptions are expected: "
        "set checkpoint.every; cluster.storage (bytes/s) tells the best interval"
    )
    (line,) = saving_warnings(llama("checkpoint.every=0"))
    assert "saving only at the end keeps 0 % of the time" in line
    (line,) = saving_warnings(llama("checkpoint.every=0", "checkpoint.final=false"))
    assert "saving never keeps 0 % of the time" in line


SLURM = "Slurm kills a stopped run after 30 s, which then resumes from an earlier checkpoint: raise KillWait in slurm.conf"
GRACES = (
    ("slurm", "pdsh", SLURM),
    (
        "torchrun",
        "pdsh",
        "torchrun kills a stopped run after 30 s, which then resumes from an earlier checkpoint: give torchrun --shutdown-timeout",
    ),
    ("local", "slurm", None),
    ("deepspeed", "pdsh", None),  # its ranks' keepers are not the launcher's
    ("deepspeed", "slurm", SLURM),  # all that a job began is its job's
)


@pytest.mark.parametrize(("launch", "runner", "line"), GRACES)
def test_a_stop_longer_than_the_grace_period_is_warned_of(launch: Any, runner: Any, line: str | None) -> None:
    """A step of 15.9 s and a save of 48.7 s, each twice: 129 s."""
    run = load_recipe("llama3_405b", ["cluster.storage=1e11", "checkpoint.every=100"])
    plan = make_plan(replace(run, launch=replace(run.launch, name=launch, runner=runner)))
    says = f"stopping and saving may take 129 s (a step of 15.9 s, a save of 48.7 s), but {line}, or write faster"
    assert [each for each in saving_warnings(plan) if each.startswith("stopping")] == ([says] if line else [])


def test_a_stop_waits_for_the_running_step_evaluation_and_save() -> None:
    """The forward passes of twelve batches take four steps: 2 x 10 + 4 x 10 + 2 x 50."""
    run = load_recipe("llama3_405b", ["train.evaluate={every: 100, batches: 12}"])
    assert stop_seconds(run, 10.0, 50.0) == pytest.approx(160.0)
    assert stop_seconds(run, 10.0, None) == pytest.approx(60.0)
    assert stop_seconds(run, None, 50.0) == pytest.approx(100.0)
    assert stop_seconds(load_recipe("llama3_405b"), 10.0, 50.0) == pytest.approx(120.0)


def test_slurm_is_asked_to_signal_a_run_as_long_before_its_end_as_a_stop_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cluster.storage=1e11", "launch=slurm", "log.dir=/runs", "train.evaluate={every: 100, batches: 3}"]
    assert command(["show", "conf=llama3_405b", *words, "--launch"]) == 0
    assert "#SBATCH --signal=TERM@145\n" in capsys.readouterr().out  # 129 s and a step's time
    assert command(["show", "conf=quickstart", "launch=slurm", "log.dir=/runs", "--launch"]) == 0
    assert "#SBATCH --signal=TERM@60\n" in capsys.readouterr().out  # the least
