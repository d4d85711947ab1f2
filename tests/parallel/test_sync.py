"""Workers that step alone: they train the curve of local steps in one process, hold and send what is planned, and agree when told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")  # simulated products of this size take longer on two


from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.tests.fakes.one_process import reference_curve  # noqa: E402
from distrain.tests.fakes.trained_runs import check_simulated, differing_messages, read_run  # noqa: E402
from distrain.trainer.loop.reference_curves.local_steps import local_steps, local_steps_curve  # noqa: E402
from distrain.trainer.loop.reference_curves.reference_run import ReferenceCurve  # noqa: E402
from distrain.trainer.plan.plan import make_plan  # noqa: E402
from distrain.trainer.rundir.resume_changes import compare_runs  # noqa: E402

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

Words = tuple[str, ...]

BASE = (
    *("quickstart", "model=tiny", "data=synthetic", "train.steps=7", "train.seq=32", "train.batch=8", "train.microbatch=1"),
    *("train.clip=0.5", "train.precision=fp32", "train.evaluate.every=0", "checkpoint.every=0", "optim.lr=1e-3", "optim.warmup=2"),
    *("parallel.zero=0", "log.every=1", "log.ledger=true"),
)
TWO, THREE, NODE = "parallel.sync.every=2", "parallel.sync.every=3", "parallel.sync.across=node"
HEAVY = ("parallel.sync.outer.lr=0.7", "parallel.sync.outer.momentum=0.9")
NESTEROV = (*HEAVY, "parallel.sync.outer.nesterov=true")
NODES = ("cluster.nodes=2", "cluster.gpus=2", NODE)
MUP = ("optim.mup=16", "optim.moments=bf16", "model.tied=false")
HALF = ("train.precision=bf16", "train.gradients=fp32")


def check_memory(folder: Path) -> None:
    """Hold the weights and the optimizer, with what steps together keep, to the plan."""
    plan = make_plan(read_run(folder))
    assert plan.memory is not None
    held = json.loads((folder / "measured.json").read_text())["memory"]
    assert held["weights"] == pytest.approx(max(stage.bytes.weights for stage in plan.memory.stages), abs=64 * 4)
    assert held["optimizer"] == pytest.approx(max(stage.bytes.optimizer for stage in plan.memory.stages), abs=1024)


# fmt: off
LAYOUTS: list[tuple[Words, float]] = [  # the layout and what else differs, the largest difference of a loss
    ((TWO,   "cluster.gpus=2", "model.dropout=0.1", "train.evaluate.every=4", "checkpoint.every=4"),                   1e-5),
    ((TWO,   "cluster.gpus=2", "model.vocab=253", "model.vocab_multiple=8"),                                             1e-5),
    ((THREE, "cluster.gpus=4", "parallel.cp=2", "parallel.zero=1", *NESTEROV),                                         1e-5),
    ((TWO,   *NODES, *NESTEROV),                                                                                        1e-5),
    ((TWO,   *NODES, "parallel.zero=1", "parallel.bucket=20000", *HALF),                                               2e-3),
    ((THREE, *NODES, "parallel.zero=2", "optim=sgd", "optim.lr=0.03", "train.clip=0", *HEAVY),                          1e-5),
    ((TWO,   *NODES, "parallel.zero=3", *NESTEROV),                                                                      1e-5),
    ((TWO,   *NODES, "cluster.gpus=4", "parallel.tp=2", "parallel.sequence=true", "parallel.zero=3", "train.steps=5"), 1e-5),
    ((TWO,   "cluster.gpus=4", "parallel.pp=2", "parallel.schedule=zb_h1", *HEAVY),                                    1e-5),
    ((TWO,   "cluster.gpus=2", "parallel.tp=1", *MUP, "checkpoint.every=4", *NESTEROV),                1e-5),
    ((THREE, *NODES, "parallel.ep=2", "parallel.zero=1", "model=tiny_moe", *NESTEROV),                                  1e-5),
]
# fmt: on


@pytest.mark.parametrize(("words", "apart"), LAYOUTS)
def test_workers_train_by_local_steps(ranks: RankPool, tmp_path: Path, words: Words, apart: float) -> None:
    job = ranks.train(tmp_path / "run", *BASE, *words)
    expected = local_steps(str(job.folder))
    check_simulated(job, expected, apart)
    assert json.loads((job.folder / "ledger.json").read_text())["averages"]
    assert not differing_messages(job.folder)
    assert differing_messages(job.folder, averages=False)
    check_memory(job.folder)


def simulated_curve(words: Words) -> ReferenceCurve:
    return local_steps_curve(load_recipe(BASE[0], [*BASE[1:], *words]))


def test_each_choice_trains_a_curve_of_its_own() -> None:
    """So a row above can fail: no two of these simulated curves are as near as an engine's must be."""
    two = (TWO, "cluster.gpus=2")
    choices = [
        *(two, (THREE, "cluster.gpus=2"), (TWO, "cluster.gpus=4"), (*two, "train.clip=0")),
        *((*two, HEAVY[0]), (*two, *HEAVY), (*two, *NESTEROV), (*two, "checkpoint.every=4")),
    ]
    curves = [simulated_curve(words).losses for words in choices]
    curves.append(reference_curve(BASE)[0])
    for at, one in enumerate(curves):
        assert all(max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-4 for other in curves[:at])
    assert simulated_curve((TWO, *NODES, "cluster.gpus=4")).losses == curves[0]  # two workers too


RESUMED_IN = [
    ("cluster.gpus=2",),
    (*NODES, "cluster.gpus=4", "parallel.tp=2", "parallel.zero=1"),
]


def test_any_layout_of_as_many_workers_resumes(ranks: RankPool, tmp_path: Path) -> None:
    """A checkpoint holds the mean of the optimizer's states, in the run that goes on as in the one that begins from it."""
    words = (*BASE, TWO, *NESTEROV, "train.steps=8", "checkpoint.every=4", "checkpoint.keep=9", "log.ledger=false")
    whole = ranks.train(tmp_path / "run", *words, "cluster.gpus=2")
    losses = simulated_curve(("cluster.gpus=2", *words[len(BASE) :])).losses
    assert whole.figures("loss") == pytest.approx(losses, abs=1e-5, rel=0)
    shutil.rmtree(whole.folder / "checkpoints" / "step_8")
    for at, layout in enumerate(RESUMED_IN):
        folder = tmp_path / f"resumed{at}" / "run"
        shutil.copytree(whole.folder, folder)
        resumed = ranks.train(folder, *words, *layout, "checkpoint.resume=must")
        assert any("resumes from step 4" in line for line in resumed.lines)
        assert [row["loss"] for row in resumed.rows[-4:]] == pytest.approx(losses[4:], abs=1e-5, rel=0)


def test_a_run_resumes_with_other_workers_and_without(ranks: RankPool, tmp_path: Path) -> None:
    """The outer momentum begins at zero where there was none, and Adam's count goes on."""
    words = (*BASE, "checkpoint.keep=9", "log.ledger=false", "cluster.gpus=2", "checkpoint.resume=auto")
    for steps, sync in ((3, ()), (6, (TWO, *NESTEROV)), (8, (TWO, *NESTEROV, "cluster.gpus=4")), (10, ("engine=native",))):
        job = ranks.train(tmp_path / "run", *words, *sync, f"train.steps={steps}")
    assert [row["step"] for row in job.rows] == list(range(1, 11))
    saved = json.loads((job.folder / "checkpoints" / "step_10" / "manifest.json").read_text())
    assert saved["extra"]["engine"]["optimizer_steps"] == 10


def test_changes_of_workers_are_reported() -> None:
    before, now = (load_recipe(BASE[0], [*BASE[1:], TWO, *words]) for words in (("cluster.gpus=2",), ("cluster.gpus=4", THREE, *HEAVY)))
    found = compare_runs(before, now, step=4)
    assert [each.text for each in found.reported] == [
        *("workers 2 -> 4", "parallel.sync.every 2 -> 3", "parallel.sync.outer.lr 1.0 -> 0.7", "parallel.sync.outer.momentum 0.0 -> 0.9"),
    ]
    assert (found.new_moments, found.dropped_moments) == (("outer_momentum",), ())
    assert compare_runs(now, before, step=4).dropped_moments == ("outer_momentum",)
    alone = load_recipe(BASE[0], [*BASE[1:], TWO, *HEAVY, "cluster.gpus=1"])  # one worker, which keeps no outer momentum
    assert compare_runs(alone, now, step=4).new_moments == ("outer_momentum",)
