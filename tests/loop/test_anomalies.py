"""A loss or gradient that is not finite on any rank leaves its step out on all, in every layout; too many in a row end the run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from distrain.cli.config.load import load
from distrain.tests.conftest import Ranks
from distrain.tests.fakes.one_process import reference
from distrain.trainer.engines.engine import Stepped
from distrain.trainer.loop.anomalies import FEWEST, HIGH, Poison, Poisoned

STEPS = 6
WORDS = (
    "quickstart", "data=synthetic", f"train.steps={STEPS}", "model=tiny", "model.layers=2", "train.batch=8", "train.seq=32",
    "train.microbatch=2",
    "optim=adamw", "optim.lr=1e-3", "optim.warmup=0", "optim.schedule=constant", "train.clip=0.5", "train.evaluate.every=0", "log.every=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Ranks of which those of some runs go wrong, by the names of their folders."""
    words = ["once=poisons", "ever=poisons_ever", "spike=spikes"]
    command = [sys.executable, str(Path(__file__).parents[1] / "rank_programs" / "spoiled_ranks.py"), *words]
    pool = Ranks(tmp_path_factory.mktemp("poisoned") / "server.log", command=command)
    with pool.server:
        yield pool


# fmt: off
LAYOUTS = (
    "cluster=1x1 parallel.zero=0", "cluster=1x1 parallel.zero=3",
    "cluster=1x2 parallel.zero=0", "cluster=1x2 parallel.zero=1", "cluster=1x2 parallel.zero=2", "cluster=1x2 parallel.zero=3",
    "cluster=1x2 parallel.tp=2 parallel.zero=0", "cluster=1x4 parallel.tp=2 parallel.zero=1 parallel.sequence=true",
    "cluster=1x4 parallel.tp=2 parallel.zero=3",
    "cluster=1x2 parallel.pp=2 parallel.zero=0", "cluster=1x4 parallel.pp=2 parallel.zero=1",
    "cluster=1x4 parallel.pp=2 parallel.tp=2 parallel.zero=0",
    "cluster=1x2 parallel.cp=2 parallel.zero=1",
)
# fmt: on


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_with_a_poisoned_gradient_is_left_out_by_all(poisoned: Ranks, tmp_path: Path, layout: str) -> None:
    """The curve is that of one process that leaves out the same step: no weight, no moment, no count of steps moved."""
    job = poisoned.trained(tmp_path / "once", *WORDS, "parallel.dp=auto", *layout.split())
    losses, norms = reference((*WORDS, "cluster=1x1", "parallel.dp=auto"), frozenset({2}))
    assert job.figures("loss") == pytest.approx(losses, abs=2e-6)
    rows = job.rows
    assert [row.get("skipped", False) for row in rows] == [False, False, True, False, False, False]
    assert rows[2]["samples"] == [16, 23]
    (line,) = (line for line in job.said if "skipped" in line)
    assert line.endswith("  skipped, weights stay: a loss or gradient is not finite on samples 16 to 23")
    assert rows[2]["grad_norm"] is None
    assert [row["grad_norm"] for row in rows if "skipped" not in row] == pytest.approx(norms[:2] + norms[3:], rel=1e-4)


@pytest.mark.parametrize(
    "layout", ["cluster=1x2 parallel.zero=1", "cluster=1x2 parallel.zero=3", "cluster=1x2 parallel.pp=2 parallel.zero=1"]
)
def test_in_bf16_too(poisoned: Ranks, ranks: Ranks, tmp_path: Path, layout: str) -> None:
    words = (*WORDS, "parallel.dp=auto", "train.precision=bf16", *layout.split())
    spoiled, whole = poisoned.trained(tmp_path / "once", *words), ranks.trained(tmp_path / "whole", *words)
    losses, clean = spoiled.figures("loss"), whole.figures("loss")
    assert losses[:3] == clean[:3]
    assert losses[3] == pytest.approx(clean[2], abs=0.2)  # another batch, the same weights
    assert losses[3] != clean[3]
    assert spoiled.rows[2]["skipped"]


def test_a_mixture_of_experts_leaves_the_same_step_out(poisoned: Ranks, tmp_path: Path) -> None:
    words = (*WORDS, "model=tiny_moe", "model.layers=2", "parallel.dp=auto")
    spread = poisoned.trained(tmp_path / "spread" / "once", *words, "cluster=1x2", "parallel.ep=2", "parallel.zero=1")
    alone = poisoned.trained(tmp_path / "alone" / "once", *words, "cluster=1x1")
    assert spread.figures("loss") == pytest.approx(alone.figures("loss"), abs=2e-6)
    assert [row.get("skipped", False) for row in spread.rows] == [False, False, True, False, False, False]


def test_a_poisoned_step_survives_a_resume(poisoned: Ranks, tmp_path: Path) -> None:
    layout = ("parallel.dp=auto", "cluster=1x2", "parallel.zero=2", "checkpoint.every=4")
    poisoned.trained(tmp_path / "once", *WORDS, *layout, "train.steps=4")
    job = poisoned.trained(tmp_path / "once", *WORDS, *layout, "checkpoint.resume=must")
    losses, _ = reference((*WORDS, "cluster=1x1", "parallel.dp=auto"), frozenset({2}))
    assert job.figures("loss") == pytest.approx(losses, abs=2e-6)


@pytest.mark.parametrize("layout", ["cluster=1x2 parallel.zero=1", "cluster=1x2 parallel.pp=2"])
@pytest.mark.parametrize(
    ("most", "at", "it"), [(0, 3, "it was"), (1, 4, "it, like the one before it, was"), (2, 5, "it, like the 2 before it, was")]
)
def test_too_many_in_a_row_end_the_run_in_one_line(poisoned: Ranks, tmp_path: Path, layout: str, most: int, at: int, it: str) -> None:
    job = poisoned.fit(tmp_path / "ever", *WORDS, "parallel.dp=auto", *layout.split(), f"train.skip={most}", "log.every=100")
    assert set(job.codes) == {1}
    says = f"step {at}: the loss or a gradient is not finite, and {it} skipped (train.skip={most}): "
    assert job.problems == (f"{says}look at samples {8 * (at - 1)} to {8 * at - 1}, or set a lower optim.lr",)
    assert [(row["step"], row["samples"]) for row in job.rows] == [(step, [8 * (step - 1), 8 * step - 1]) for step in range(3, at + 1)]


def test_a_spike_is_marked_where_it_is(poisoned: Ranks, tmp_path: Path) -> None:
    job = poisoned.trained(tmp_path / "spike", *WORDS, "cluster=1x1", "parallel.dp=auto", "train.steps=24", "log.every=100")
    marked, last = job.rows
    assert (marked["step"], last["step"]) == (21, 24)
    assert marked["spike"] > HIGH
    assert "spike" not in last
    assert any("step 21/24" in line and "a spike, " in line for line in job.said)


# What is made of losses, without ranks


def seen(*losses: float) -> Poison:
    poison = Poison(load("quickstart"))
    for done, loss in enumerate(losses, 1):
        poison.marks(Stepped(loss=loss, grad_norm=1.0, skipped=False), done)
    return poison


def test_a_score_is_worked_out_by_medians() -> None:
    """Losses 1 to 17: their median is 9, that of their distances from it 4; (39 - 9) / (1.4826 x 4) = 5.0587."""
    assert seen(*range(1, 18)).score(39.0) == pytest.approx(5.0587, abs=1e-4)


def test_one_spike_does_not_hide_the_next() -> None:
    losses = [3.0 + 0.01 * (at % 5) for at in range(40)]
    assert seen(*losses, 9.0).score(9.0) > HIGH


def test_few_losses_are_held_against_nothing_and_equal_ones_against_a_floor() -> None:
    assert seen(*[3.0] * (FEWEST - 1)).score(9.0) == 0.0
    assert seen(*[3.0] * FEWEST).score(3.05) == pytest.approx(0.05 / 0.015)
    assert seen(*[3.0 - 0.02 * at for at in range(40)]).score(2.3) < HIGH  # still falling
    assert seen(*[0.0] * FEWEST).score(1e-3) == pytest.approx(1e-3 / (0.005 * 0.1))  # a loss that has come down to nothing


def test_only_steps_in_a_row_are_counted() -> None:
    run = load("quickstart", ["train.skip=1"])
    poison, bad, good = (
        Poison(run),
        Stepped(loss=float("nan"), grad_norm=None, skipped=True),
        Stepped(loss=3.0, grad_norm=1.0, skipped=False),
    )
    for done, each in enumerate((bad, good, bad, good, bad), 1):
        poison.marks(each, done)
        poison.stop(each, done)
    poison.marks(bad, 6)
    with pytest.raises(Poisoned, match="step 6: "):
        poison.stop(bad, 6)


def test_fp16_may_skip_as_often_as_its_scale_wants() -> None:
    run = load("quickstart")
    poison = Poison(replace(run, train=replace(run.train, precision="fp16", skip=0)))
    overflow = Stepped(loss=3.0, grad_norm=None, skipped=True)
    for done in range(1, 20):
        poison.marks(overflow, done)
        poison.stop(overflow, done)
