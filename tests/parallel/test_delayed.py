"""Pipelines without a flush: they train the curve of delayed gradients in one process, hold and send what is planned, flush when told."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")  # simulated products of this size take longer on two


from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.tests.fakes.one_process import reference_curve  # noqa: E402
from distrain.tests.fakes.trained_runs import check_simulated, differing_messages, read_run  # noqa: E402
from distrain.trainer.loop.reference_curves.delayed_gradients import delayed_curve, delayed_gradients  # noqa: E402
from distrain.trainer.loop.reference_curves.reference_run import ReferenceCurve  # noqa: E402
from distrain.trainer.plan.plan import make_plan  # noqa: E402
from distrain.trainer.rundir.resume_changes import compare_runs  # noqa: E402
from distrain.trainer.spec.sections.lr_schedule import learning_rate  # noqa: E402

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import PoolJob, RankPool

Words = tuple[str, ...]

BASE = (
    *("quickstart", "model=tiny", "model.tied=false", "model.layers=4", "data=synthetic", "train.steps=6", "train.seq=32"),
    *("train.batch=4", "train.microbatch=1", "train.clip=0.5", "train.precision=fp32", "train.evaluate.every=0", "checkpoint.every=0"),
    *("optim.lr=1e-3", "optim.warmup=2", "parallel.zero=0", "engine=native", "log.every=1", "log.ledger=true"),
)
PIPEDREAM, TWO_VERSIONS = "parallel.schedule=pipedream", "parallel.schedule=pipedream_2bw"
LARGER = (PIPEDREAM, "parallel.pp=2", "cluster.gpus=2", "train.microbatch=2")  # larger micro-batches
SHORT = "train.steps=4"
SGD = ("optim=sgd", "optim.lr=0.03")
HALF = ("train.precision=bf16", "train.gradients=fp32")
MOE = ("model=tiny_moe", "model.tied=false", "model.layers=4")


def check_steps(job: PoolJob) -> None:
    """Every step is logged once, in order, with its own learning rate."""
    run = read_run(job.folder)
    steps = run.train.steps or 0
    rows = [row for row in job.rows if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert [row["lr"] for row in rows] == [learning_rate(run.optim, step, steps) for step in range(steps)]


MUP = ("optim.mup=16", "optim.moments=bf16", "model.tied=false")

# fmt: off
LAYOUTS: list[tuple[Words, float]] = [  # the layout and what else differs, the largest difference of a loss
    ((PIPEDREAM,    "parallel.pp=2", "cluster.gpus=2", "model.dropout=0.1", "train.evaluate.every=4", "checkpoint.every=3"),  1e-5),
    ((PIPEDREAM,    "parallel.pp=4", "cluster.gpus=4", *SGD, SHORT),                                                           1e-5),
    ((PIPEDREAM,    "parallel.pp=2", "cluster.gpus=4", "parallel.tp=2", "parallel.sequence=true", "train.batch=2", SHORT),     1e-5),
    ((PIPEDREAM,    "parallel.pp=3", "cluster.gpus=3", "parallel.vertical=true", "parallel.stages=[1,1,2]", "train.clip=0", SHORT), 1e-5),
    ((PIPEDREAM,    "parallel.pp=4", "cluster.gpus=4", "train.batch=2", SHORT),                                                1e-5),
    ((PIPEDREAM,    "parallel.pp=2", "cluster.gpus=4", "parallel.zero=1", "parallel.recompute=full", SHORT),                   1e-5),
    ((PIPEDREAM,    "parallel.pp=2", "cluster.gpus=4", "parallel.ep=2", *MOE, SHORT),                                          1e-5),
    ((PIPEDREAM,    "parallel.pp=2", "cluster.gpus=4", "parallel.ep=2", "model=tiny_hybrid", SHORT),                           1e-5),
    ((PIPEDREAM,    "parallel.pp=2", "cluster.gpus=2", *HALF, SHORT),                                                          2e-3),
    ((PIPEDREAM,    "parallel.pp=2", "cluster.gpus=4", "parallel.zero=1", *MUP, SHORT),                        1e-5),
    ((TWO_VERSIONS, "parallel.pp=2", "cluster.gpus=2", *SGD, "train.evaluate.every=4", "checkpoint.every=3"),                  1e-5),
    ((TWO_VERSIONS, "parallel.pp=3", "cluster.gpus=3", "model.dropout=0.1", SHORT),                                            1e-5),
    ((TWO_VERSIONS, "parallel.pp=2", "cluster.gpus=4", "parallel.cp=2", SHORT),                                                1e-5),
    ((TWO_VERSIONS, "parallel.pp=2", "cluster.gpus=4", "parallel.zero=1", *HALF, SHORT),                                       2e-3),
]
# fmt: on


@pytest.mark.parametrize(("words", "apart"), LAYOUTS)
def test_a_pipeline_without_a_flush_trains_by_delayed_gradients(ranks: RankPool, tmp_path: Path, words: Words, apart: float) -> None:
    """In fp32 losses were at most 1e-6 apart, norms 4e-6 of themselves; bf16's, whose forward rounds, 4e-4 and 8e-3. Weights were 6e-6
    apart, and on another CPU one of them 1.6e-4: where gradients are as small as AdamW's eps, it steps by what rounding left of them."""
    job = ranks.train(tmp_path / "run", *BASE, *words)
    expected = delayed_gradients(str(job.folder))
    check_simulated(job, expected, apart)
    check_steps(job)
    assert not differing_messages(job.folder)


def test_each_delay_trains_a_curve_of_its_own() -> None:
    """So a row above can fail: no two of these simulated curves are as near as an engine's must be."""
    four, two = ("parallel.pp=4", "cluster.gpus=4"), ("parallel.pp=2", "cluster.gpus=2")
    layouts = [
        *((PIPEDREAM, *two), (PIPEDREAM, *four), (PIPEDREAM, *four, "parallel.vertical=true"), (TWO_VERSIONS, *four)),
        *((PIPEDREAM, *four, "checkpoint.every=2"), (PIPEDREAM, *four, "train.clip=0")),
    ]
    curves = [simulated_curve(layout).losses for layout in layouts]
    curves.append(reference_curve(BASE)[0])
    for at, one in enumerate(curves):
        assert all(max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-3 for other in curves[:at])


def simulated_curve(words: Words) -> ReferenceCurve:
    return delayed_curve(load_recipe(BASE[0], [*BASE[1:], *words]))


def test_without_stages_both_are_plain_training(ranks: RankPool, tmp_path: Path) -> None:
    losses, norms = reference_curve((*BASE, SHORT))
    for name in (PIPEDREAM, TWO_VERSIONS):
        job = ranks.train(tmp_path / name[-4:], *BASE, SHORT, name, "cluster.gpus=2", "parallel.zero=1")
        assert job.figures("loss") == pytest.approx(losses, abs=3e-6, rel=0)
        assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=2e-5)


# fmt: off
HELD = [
    (PIPEDREAM,    "parallel.pp=4", "cluster.gpus=4"),
    (PIPEDREAM,    "parallel.pp=3", "cluster.gpus=3", "parallel.vertical=true"),
    (PIPEDREAM,    "parallel.pp=2", "cluster.gpus=4", "parallel.zero=1", *HALF),
    (TWO_VERSIONS, "parallel.pp=3", "cluster.gpus=3"),
]
# fmt: on


@pytest.mark.parametrize("words", HELD)
def test_a_stage_holds_the_versions_and_activations_that_are_planned(ranks: RankPool, tmp_path: Path, words: Words) -> None:
    job = ranks.train(tmp_path / "run", *BASE, *words, "train.steps=3")
    plan = make_plan(load_recipe(BASE[0], [*BASE[1:], *words]))
    assert plan.memory is not None
    held = json.loads((job.folder / "measured.json").read_text())["ranks"]
    each = len(held) // len(plan.memory.stages)
    for at, stage in enumerate(plan.memory.stages):
        most = {kind: max(rank[kind] for rank in held[at * each : (at + 1) * each]) for kind in held[0]}
        assert most["weights"] == pytest.approx(stage.bytes.weights, abs=64 * 4)
        assert most["gradients"] == pytest.approx(stage.bytes.gradients, abs=64)
        assert most["optimizer"] == pytest.approx(stage.bytes.optimizer, abs=1024)
        assert most["activations"] == pytest.approx(stage.bytes.activations + stage.bytes.logits, rel=2e-3)


def test_a_resume_trains_as_the_run_that_saved_does(ranks: RankPool, tmp_path: Path) -> None:
    """A checkpoint follows a flush, in the run that goes on as in the one that begins from it."""
    words = (*BASE, PIPEDREAM, "parallel.pp=2", "cluster.gpus=2", "checkpoint.every=3", "checkpoint.keep=9", "log.ledger=false")
    whole = ranks.train(tmp_path / "run", *words)
    shutil.rmtree(whole.folder / "checkpoints" / "step_6")
    resumed = ranks.train(tmp_path / "run", *words, "checkpoint.resume=must")
    assert any("resumes from step 3" in line for line in resumed.lines)
    losses = simulated_curve(words[len(BASE) :]).losses
    assert len(resumed.rows) == 9
    for rows in (resumed.rows[:6], [*resumed.rows[:3], *resumed.rows[6:]]):
        assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-5, rel=0)


def test_a_resume_with_another_delay_is_reported() -> None:
    """The layouts of other schedules are free: they train the same curve."""
    late, later, flushed, larger = (
        load_recipe(BASE[0], [*BASE[1:], *words])
        for words in (
            (PIPEDREAM, "parallel.pp=2", "cluster.gpus=2"),
            (PIPEDREAM, "parallel.pp=4", "cluster.gpus=4"),
            ("cluster.gpus=2",),
            LARGER,
        )
    )
    assert [each.text for each in compare_runs(late, later, step=3).reported] == ["parallel.pp 2 -> 4"]
    reported = [each.text for each in compare_runs(late, flushed, step=3).reported]
    assert reported == ["parallel.schedule pipedream -> 1f1b", "parallel.pp 2 -> 1"]
    assert compare_runs(flushed, flushed, step=3).reported == ()
    assert [each.text for each in compare_runs(late, larger, step=3).reported] == ["updates of a step 4 -> 2"]
    once = [replace(each, parallel=replace(each.parallel, schedule="pipedream_2bw")) for each in (late, larger)]
    assert compare_runs(*once, step=3).reported == ()


def test_a_stopped_run_flushes_and_saves(ranks: RankPool, tmp_path: Path) -> None:
    """All ranks agree on the step after which they stop, a step after they are asked; every step before it has its result."""
    words = (*BASE, TWO_VERSIONS, "parallel.pp=2", "cluster.gpus=2", "log.ledger=false")
    stopped = ranks.fit(tmp_path / "run", *words, signals=[(2, 1, signal.SIGTERM)])
    assert set(stopped.codes) == {75}
    saved = len(stopped.rows)
    assert (stopped.folder / "checkpoints" / f"step_{saved}").is_dir()
    check = ranks.train(tmp_path / "run", *words, "checkpoint.resume=must")
    assert 3 <= saved < 6
    check_steps(check)
