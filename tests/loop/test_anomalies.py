"""All ranks skip a step whose loss or gradient is not finite on any of them, in every layout; too many in a row end the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.one_process import reference_curve
from distrain.tests.fakes.rank_pool import RankPool, choose_program
from distrain.trainer.engines.engine import NO_LIMITS, StepResult
from distrain.trainer.loop.failures.anomalies import SPIKE_SCORE, Anomalies, TooManySkippedSteps
from distrain.trainer.loop.failures.recent_values import FEWEST
from distrain.trainer.plan.engines import engine_for, engine_reason

STEPS = 6
OVERRIDES = (
    "quickstart", "data=synthetic", f"train.steps={STEPS}", "model=tiny", "model.layers=2", "train.batch=8", "train.seq=32",
    "train.microbatch=2",
    "optim=adamw", "optim.lr=1e-3", "optim.warmup=0", "optim.schedule=constant", "train.clip=0.5", "train.evaluate.every=0", "log.every=1",
)  # fmt: skip


@pytest.fixture
def faulty(ranks: RankPool, tmp_path: Path) -> RankPool:
    """A pool whose ranks are faulty in the runs of these folder names."""
    choose_program(
        tmp_path,
        "spoiled",
        {"once": "poisons", "ever": "poisons_ever", "spike": "spikes", "gradient": "loud_gradient", "loss": "loud_loss"},
    )
    return ranks


# fmt: off
LAYOUTS = (
    "cluster=1x1 parallel.zero=0", "cluster=1x2 parallel.zero=1", "cluster=1x2 parallel.zero=2", "cluster=1x2 parallel.zero=3",
    "cluster=1x2 parallel.tp=2 parallel.zero=0", "cluster=1x4 parallel.tp=2 parallel.zero=1 parallel.sequence=true",
    "cluster=1x2 parallel.pp=2 parallel.zero=0", "cluster=1x4 parallel.pp=2 parallel.zero=1",
    "cluster=1x2 parallel.cp=2 parallel.zero=1",
    "engine=native cluster=1x1", "engine=native cluster=1x2 parallel.zero=2", "engine=native cluster=1x2 parallel.pp=2 parallel.zero=0",
)
# fmt: on


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_skip_a_step_with_a_nan_gradient(faulty: RankPool, tmp_path: Path, layout: str) -> None:
    """The losses are those of one process that skips the same step: weights, moments and step count are unchanged."""
    job = faulty.train(tmp_path / "once", *OVERRIDES, "parallel.dp=auto", *layout.split())
    losses, norms = reference_curve((*OVERRIDES, "cluster=1x1", "parallel.dp=auto"), frozenset({2}))
    assert job.figures("loss") == pytest.approx(losses, abs=2e-6)
    rows = job.rows
    assert [row.get("skipped", False) for row in rows] == [False, False, True, False, False, False]
    assert rows[2]["samples"] == [16, 23]
    (line,) = (line for line in job.lines if "skipped" in line)
    assert line.endswith("  skipped, weights unchanged: the loss or a gradient is not finite on samples 16 to 23")
    assert rows[2]["grad_norm"] is None
    assert [row["grad_norm"] for row in rows if "skipped" not in row] == pytest.approx(norms[:2] + norms[3:], rel=1e-4)


@pytest.mark.parametrize("layout", ["cluster=1x2 parallel.zero=3", "cluster=1x2 parallel.pp=2 parallel.zero=1"])
def test_bf16_runs_skip_a_step_with_a_nan_gradient(faulty: RankPool, ranks: RankPool, tmp_path: Path, layout: str) -> None:
    overrides = (*OVERRIDES, "parallel.dp=auto", "train.precision=bf16", *layout.split())
    spoiled, whole = faulty.train(tmp_path / "once", *overrides), ranks.train(tmp_path / "whole", *overrides)
    losses, clean = spoiled.figures("loss"), whole.figures("loss")
    assert losses[:3] == clean[:3]
    assert losses[3] == pytest.approx(clean[2], abs=0.2)  # another batch, the same weights
    assert losses[3] != clean[3]
    assert spoiled.rows[2]["skipped"]


def test_muon_skips_the_same_step(faulty: RankPool, tmp_path: Path) -> None:
    """Momenta are unchanged too."""
    words = (*OVERRIDES, "optim.name=muon", "parallel.dp=auto")
    losses, _ = reference_curve((*words, "cluster=1x1"), frozenset({2}))
    job = faulty.train(tmp_path / "once", *words, "cluster=1x2", "parallel.zero=1")
    assert [row.get("skipped", False) for row in job.rows] == [False, False, True, False, False, False]
    assert job.figures("loss") == pytest.approx(losses, abs=2e-6)


def test_compression_forgets_the_errors_of_a_skipped_step(faulty: RankPool, ranks: RankPool, tmp_path: Path) -> None:
    """Else no later gradient would be finite."""
    overrides = (*OVERRIDES, "parallel.dp=auto", "cluster=1x2", "parallel.zero=0", "parallel.compress.name=powersgd")
    spoiled, whole = faulty.train(tmp_path / "once", *overrides), ranks.train(tmp_path / "whole", *overrides)
    assert spoiled.figures("loss")[:3] == whole.figures("loss")[:3]
    assert [row.get("skipped", False) for row in spoiled.rows] == [False, False, True, False, False, False]
    assert spoiled.figures("loss")[3:] != whole.figures("loss")[3:]


def test_a_mixture_of_experts_skips_the_same_step(faulty: RankPool, tmp_path: Path) -> None:
    """And leaves the biases of its routers."""
    overrides = (*OVERRIDES, "model=tiny_moe", "model.layers=2", "model.router={bias: true, bias_rate: 0.02}", "parallel.dp=auto")
    spread = faulty.train(tmp_path / "once", *overrides, "cluster=1x2", "parallel.ep=2", "parallel.zero=1")
    losses, _ = reference_curve((*overrides, "cluster=1x1"), frozenset({2}))
    assert spread.figures("loss") == pytest.approx(losses, abs=2e-6)
    assert [row.get("skipped", False) for row in spread.rows] == [False, False, True, False, False, False]


def test_a_run_resumes_after_a_skipped_step(faulty: RankPool, tmp_path: Path) -> None:
    layout = ("parallel.dp=auto", "cluster=1x2", "parallel.zero=2", "checkpoint.every=4")
    faulty.train(tmp_path / "once", *OVERRIDES, *layout, "train.steps=4")
    job = faulty.train(tmp_path / "once", *OVERRIDES, *layout, "checkpoint.resume=must")
    losses, _ = reference_curve((*OVERRIDES, "cluster=1x1", "parallel.dp=auto"), frozenset({2}))
    assert job.figures("loss") == pytest.approx(losses, abs=2e-6)


@pytest.mark.parametrize(
    ("layout", "most", "at", "it"),
    [
        ("parallel.zero=1", 0, 3, "it was"),
        ("parallel.zero=1", 1, 4, "it, like the one before it, was"),
        ("parallel.pp=2", 2, 5, "it, like the 2 before it, was"),
    ],
)
def test_too_many_skipped_steps_in_a_row_end_the_run_with_one_line(
    faulty: RankPool, tmp_path: Path, layout: str, most: int, at: int, it: str
) -> None:
    job = faulty.fit(tmp_path / "ever", *OVERRIDES, "parallel.dp=auto", "cluster=1x2", layout, f"train.skip={most}", "log.every=100")
    assert set(job.codes) == {1}
    says = f"step {at}: the loss or a gradient is not finite, and {it} skipped (train.skip={most}): "
    assert job.problems == (f"{says}look at samples {8 * (at - 1)} to {8 * at - 1}, or set a lower optim.lr",)
    assert [(row["step"], row["samples"]) for row in job.rows] == [(step, [8 * (step - 1), 8 * step - 1]) for step in range(3, at + 1)]


def test_a_loss_spike_is_marked_at_its_step(faulty: RankPool, tmp_path: Path) -> None:
    job = faulty.train(tmp_path / "spike", *OVERRIDES, "cluster=1x1", "parallel.dp=auto", "train.steps=24", "log.every=100")
    marked, last = job.rows
    assert (marked["step"], last["step"]) == (21, 24)
    assert marked["spike"] > SPIKE_SCORE
    assert "spike" not in last
    assert any("step 21/24" in line and "loss spike: " in line for line in job.lines)


# Steps that are skipped because of a spike

SKIPS = (*OVERRIDES, "train.skip_spikes=6", "train.steps=24", "parallel.dp=auto")


@pytest.mark.parametrize(
    ("fault", "layout", "name"),
    [
        ("gradient", "cluster=1x1", "norm_spike"),
        ("gradient", "cluster=1x2 parallel.zero=2", "norm_spike"),
        ("loss", "cluster=1x4 parallel.pp=2 parallel.zero=1", "spike"),
        ("loss", "cluster=1x2 parallel.tp=2 parallel.zero=0 train.precision=fp16", "spike"),
    ],
)
def test_all_ranks_skip_a_spike(faulty: RankPool, tmp_path: Path, fault: str, layout: str, name: str) -> None:
    """The weights are those of one process that skips the same step; a run that resumes before the spike remembers what it is beyond."""
    folder, words = tmp_path / fault, (*SKIPS, *layout.split())
    faulty.train(folder, *words, "train.steps=19")
    job = faulty.train(folder, *words, "checkpoint.resume=must")
    losses, norms = reference_curve((*OVERRIDES, "cluster=1x1", "parallel.dp=auto", "train.steps=24"), frozenset({20}))
    rows = job.rows
    assert [row["step"] for row in rows if "skipped" in row] == [21]
    (skipped,) = (row for row in rows if row["step"] == 21)
    assert skipped["samples"] == [160, 167]
    assert skipped[name] > 6
    assert not {"spike", "norm_spike"} - {name} & set(skipped)
    assert skipped["grad_norm"] > 6 * norms[20] if fault == "gradient" else skipped["loss"] == pytest.approx(3 * losses[20], rel=1e-3)
    if "fp16" in layout:  # a spike is no overflow: the loss scale stays
        manifests = (folder / "checkpoints" / f"step_{step}" / "manifest.json" for step in (19, 24))
        before, after = (json.loads(each.read_text())["extra"]["engine"]["scale"] for each in manifests)
        assert before | {"cur_iter": 24} == after
    near = 2e-2 if "fp16" in layout else 2e-6
    assert [row["loss"] for row in rows[-3:]] == pytest.approx(losses[21:], abs=near)
    what = "losses" if name == "spike" else "norms"
    says = f"skipped, weights unchanged: a spike, {skipped[name]} deviations above recent {what}, on samples 160 to 167"
    assert sum(line.endswith(says) for line in job.lines) == 1


def spiky(*words: str) -> tuple[Anomalies, StepResult]:
    """Anomalies after 20 steps of loss 3 and norm 1, each with a little noise, and a step beyond the limits."""
    anomalies = Anomalies(load_recipe("quickstart", words))
    for done in range(1, 21):
        anomalies.add_step(StepResult(loss=3 + 0.03 * (done % 5), grad_norm=1 + 0.1 * (done % 5), skipped=False), done)
    return anomalies, StepResult(loss=5.0, grad_norm=4.0, skipped=True, beyond_limits=True)


def test_limits_are_deviations_above_recent_medians() -> None:
    """Losses have the median 3.06 and the median absolute deviation 0.03, norms 1.2 and 0.1."""
    anomalies, _ = spiky("train.skip_spikes=5")
    loss, norm = anomalies.limits()
    assert loss == pytest.approx(3.06 + 5 * 1.4826 * 0.03)
    assert norm == pytest.approx(1.2 + 5 * 1.4826 * 0.1)
    assert spiky()[0].limits() == Anomalies(load_recipe("quickstart", ["train.skip_spikes=5"])).limits() == NO_LIMITS
    equal = Anomalies(load_recipe("quickstart", ["train.skip_spikes=5"]), recent={"losses": [3.0] * 16, "norms": [2.0] * 16})
    assert equal.limits() == pytest.approx((3 + 5 * 0.015, 2 + 5 * 0.1))


def test_norms_may_be_zero() -> None:
    anomalies = Anomalies(load_recipe("quickstart", ["train.skip_spikes=5"]))
    for done in range(1, 20):
        anomalies.add_step(StepResult(loss=3.0, grad_norm=0.0, skipped=False), done)
    row = anomalies.add_step(StepResult(loss=3.0, grad_norm=0.1, skipped=True, beyond_limits=True), 20)
    assert row["norm_spike"] > 5


def test_a_step_over_the_limits_is_counted_and_remembered() -> None:
    anomalies, spike = spiky("train.skip_spikes=6", "train.skip=1")
    row = anomalies.add_step(spike, 21)
    assert row == {"skipped": True, "samples": (320, 335), "spike": 43.6, "norm_spike": 18.9}
    anomalies.raise_if_too_many(spike, 21)
    assert [each[-1] for each in anomalies.recent_figures().values()] == [5.0, 4.0]
    anomalies.add_step(spike, 22)
    says = r"step 22: the loss or the norm of the gradients is more than 6 deviations above recent ones, and it, like the one before it, "
    with pytest.raises(TooManySkippedSteps, match=rf"{says}was skipped \(train.skip=1\): .* or a higher train.skip_spikes"):
        anomalies.raise_if_too_many(spike, 22)


# fmt: off
ENGINES: list[tuple[tuple[str, ...], str | None, str]] = [  # words, the engine that auto takes, what is said of the first limit
    ((), "native", ""),
    (("engine=zero",), "zero", "engine zero does not run train.skip_spikes=6"),
    (("engine=pipe", "parallel.pp=2"), "pipe", "engine pipe does not run train.skip_spikes=6"),
    (("parallel.pp=2", "parallel.schedule=pipedream", "model.tied=false"), None,
        "engine native does not run train.skip_spikes=6 with parallel.schedule=pipedream"),
]
# fmt: on


@pytest.mark.parametrize(("words", "engine", "says"), ENGINES)
def test_engine_native_alone_skips_spikes(words: tuple[str, ...], engine: str | None, says: str) -> None:
    run = load_recipe("quickstart", ["train.skip_spikes=6", "parallel.dp=auto", *words])
    row, limits = engine_for(run, run.parallel)
    assert (row.name if row else None) == engine
    assert (limits[0].says if limits else "") == says
    if not says:
        assert engine_reason(run, run.parallel, "native") == "it alone runs train.skip_spikes=6"


def test_nothing_is_kept_where_no_spike_is_skipped() -> None:
    assert spiky()[0].recent_figures() == {}


# Spike scores, without ranks


def after(*losses: float) -> Anomalies:
    anomalies = Anomalies(load_recipe("quickstart"))
    for done, loss in enumerate(losses, 1):
        anomalies.add_step(StepResult(loss=loss, grad_norm=1.0, skipped=False), done)
    return anomalies


def spike_score(anomalies: Anomalies, loss: float) -> float:
    return anomalies._losses.score(loss)


def test_a_spike_score_is_based_on_medians() -> None:
    """Losses 1 to 17 have the median 9 and the median absolute deviation 4; (39 - 9) / (1.4826 x 4) = 5.0587."""
    assert spike_score(after(*range(1, 18)), 39.0) == pytest.approx(5.0587, abs=1e-4)


def test_one_spike_does_not_hide_the_next() -> None:
    losses = [3.0 + 0.01 * (at % 5) for at in range(40)]
    assert spike_score(after(*losses, 9.0), 9.0) > SPIKE_SCORE


def test_few_losses_score_0_and_equal_losses_have_a_smallest_spread() -> None:
    assert spike_score(after(*[3.0] * (FEWEST - 1)), 9.0) == 0.0
    assert spike_score(after(*[3.0] * FEWEST), 3.05) == pytest.approx(0.05 / 0.015)
    assert spike_score(after(*[3.0 - 0.02 * at for at in range(40)]), 2.3) < SPIKE_SCORE  # still falling
    assert spike_score(after(*[0.0] * FEWEST), 1e-3) == pytest.approx(1e-3 / (0.005 * 0.1))  # a loss that has come down to nothing


def test_only_consecutive_skipped_steps_count() -> None:
    run = load_recipe("quickstart", ["train.skip=1"])
    anomalies, bad, good = (
        Anomalies(run),
        StepResult(loss=float("nan"), grad_norm=None, skipped=True),
        StepResult(loss=3.0, grad_norm=1.0, skipped=False),
    )
    for done, each in enumerate((bad, good, bad, good, bad), 1):
        anomalies.add_step(each, done)
        anomalies.raise_if_too_many(each, done)
    anomalies.add_step(bad, 6)
    with pytest.raises(TooManySkippedSteps, match="step 6: "):
        anomalies.raise_if_too_many(bad, 6)


def test_fp16_overflows_end_a_run_once_its_loss_scale_can_fall_no_further() -> None:
    run = load_recipe("quickstart")
    anomalies = Anomalies(replace(run, train=replace(run.train, precision="fp16", skip=0)))
    overflow = StepResult(loss=3.0, grad_norm=None, skipped=True)
    for done in range(1, 65):
        anomalies.add_step(overflow, done)
        anomalies.raise_if_too_many(overflow, done)
    anomalies.add_step(overflow, 65)
    with pytest.raises(TooManySkippedSteps, match="step 65: the gradients of 65 steps in a row were not finite"):
        anomalies.raise_if_too_many(overflow, 65)
