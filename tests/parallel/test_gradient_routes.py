"""Gradients that are summed in two levels, by parameter servers, or used late: the curves, messages and bytes that are planned."""

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
from distrain.trainer.loop.reference_curves.delayed_gradients import delayed_curve, delayed_gradients  # noqa: E402
from distrain.trainer.loop.reference_curves.reference_run import ReferenceCurve  # noqa: E402
from distrain.trainer.plan.layout.gradient_routes import server_ranks  # noqa: E402
from distrain.trainer.plan.layout.layout import mesh_of  # noqa: E402
from distrain.trainer.plan.plan import make_plan  # noqa: E402

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

Words = tuple[str, ...]

BASE = (
    *("quickstart", "model=tiny", "data=synthetic", "train.steps=7", "train.seq=32", "train.batch=8", "train.microbatch=1"),
    *("train.clip=0.5", "train.precision=fp32", "train.evaluate.every=0", "checkpoint.every=0", "optim.lr=1e-3", "optim.warmup=2"),
    *("parallel.zero=0", "log.every=1", "log.ledger=true"),
)
LATE, LATER = "parallel.staleness=1", "parallel.staleness=3"
SERVER, TWO_SERVERS = ("parallel.reduce=server",), ("parallel.reduce=server", "parallel.servers=2")
LEVELS = ("parallel.reduce=hierarchical", "cluster.nodes=2", "cluster.gpus=2")
HALF = ("train.precision=bf16", "train.gradients=fp32")
SMALL = "parallel.bucket=20000"


def check_memory(folder: Path) -> None:
    """Hold what each rank holds between passes to the plan of a rank that is a server, or of one that is not."""
    run = read_run(folder)
    plan = make_plan(run)
    assert plan.memory is not None
    stages = plan.memory.stages
    measured = json.loads((folder / "measured.json").read_text())
    for kind in ("weights", "gradients", "optimizer"):
        assert measured["memory"][kind] == pytest.approx(max(getattr(stage.bytes, kind) for stage in stages), abs=2048), kind
    if run.parallel.reduce == "server" and (late := run.parallel.staleness):  # gradients of the late buckets have not come in the last step
        planned = max(stage.bytes.buffers for stage in stages)
        assert planned * late / (late + 1) - 2048 <= measured["memory"]["buffers"] <= planned + 2048
    if run.parallel.reduce != "server" or mesh_of(run.parallel, plan.world).dp < plan.world:
        return
    for rank, held in enumerate(measured["ranks"]):  # a rank that is no server keeps no more than counts of steps
        assert (held["optimizer"] > 1024) == (rank in server_ranks(run.parallel.servers, plan.world))


# fmt: off
STALE: list[tuple[Words, float]] = [  # the layout and what else differs, the largest difference of a loss
    ((LATE,  "cluster.gpus=2", "model.dropout=0.1", "train.evaluate.every=4", "checkpoint.every=3"),                  1e-5),
    ((LATER, "cluster.gpus=4", "parallel.cp=2", "parallel.zero=1", SMALL, *HALF),                                     2e-3),
    ((LATE,  "cluster.gpus=4", "parallel.pp=2", "parallel.schedule=zb_h1", "optim=sgd", "optim.lr=0.03"),             1e-5),
    ((LATER, "cluster.gpus=4", "parallel.tp=2", "parallel.sequence=true", "train.clip=0", *TWO_SERVERS),               1e-5),
    ((LATE,  "cluster.gpus=2", "parallel.ep=2", "parallel.zero=1", "model=tiny_moe"),                                  1e-5),
]
# fmt: on


@pytest.mark.parametrize(("words", "apart"), STALE)
def test_sums_that_are_used_late_train_by_delayed_gradients(ranks: RankPool, tmp_path: Path, words: Words, apart: float) -> None:
    job = ranks.train(tmp_path / "run", *BASE, *words)
    check_simulated(job, delayed_gradients(str(job.folder)), apart)
    assert [row["step"] for row in job.rows] == list(range(1, 8))
    assert not differing_messages(job.folder)
    check_memory(job.folder)


def simulated(words: Words) -> ReferenceCurve:
    return delayed_curve(load_recipe(BASE[0], [*BASE[1:], *words]))


def test_each_staleness_trains_a_curve_of_its_own() -> None:
    """So a row above can fail: no two of these simulated curves are as near as an engine's must be."""
    two = "cluster.gpus=2"
    choices = [
        (LATE, two),
        (LATER, two),
        (LATE, two, "train.clip=0"),
        (LATE, two, "checkpoint.every=2"),
        (LATE, two, "train.evaluate.every=3"),
    ]
    curves = [simulated(words).losses for words in choices]
    curves.append(reference_curve(BASE)[0])
    for at, one in enumerate(curves):
        assert all(max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-4 for other in curves[:at])


def test_any_layout_resumes_late_sums(ranks: RankPool, tmp_path: Path) -> None:
    """What was under way is used before a checkpoint is saved, in the run that goes on as in the one that begins from it."""
    words = (*BASE, LATER, "train.steps=8", "checkpoint.every=4", "checkpoint.keep=9", "log.ledger=false")
    whole = ranks.train(tmp_path / "run", *words, "cluster.gpus=2")
    losses = simulated(("cluster.gpus=2", *words[len(BASE) :])).losses
    assert whole.figures("loss") == pytest.approx(losses, abs=1e-5, rel=0)
    shutil.rmtree(whole.folder / "checkpoints" / "step_8")
    resumed = ranks.train(whole.folder, *words, "cluster.gpus=4", "parallel.pp=2", "parallel.zero=1", "checkpoint.resume=must")
    assert any("resumes from step 4" in line for line in resumed.lines)
    assert [row["loss"] for row in resumed.rows[-4:]] == pytest.approx(losses[4:], abs=1e-5, rel=0)


def test_one_rank_sums_nothing_and_waits_for_nothing(ranks: RankPool, tmp_path: Path) -> None:
    job = ranks.train(tmp_path / "run", *BASE, LATE, *TWO_SERVERS, "cluster.gpus=1")
    losses, _ = reference_curve(BASE)
    assert job.figures("loss") == pytest.approx(losses, abs=1e-5, rel=0)
    check_memory(job.folder)


ROUTES: list[tuple[Words, float]] = [
    ((*SERVER, "cluster.gpus=2", "model.dropout=0.1", "train.evaluate.every=7"), 1e-5),
    ((*TWO_SERVERS, "cluster.gpus=3", "train.batch=9", SMALL, "parallel.overlap.data=false"), 1e-5),
    ((*TWO_SERVERS, "cluster.gpus=4", "parallel.cp=2", *HALF), 1e-3),
    (
        (*SERVER, "cluster.gpus=4", "parallel.pp=2", "parallel.schedule=interleaved", "parallel.chunks=2", "optim=sgd", "optim.lr=0.03"),
        1e-5,
    ),
    ((*LEVELS, "model.dropout=0.1", SMALL), 1e-5),
    ((*LEVELS, "cluster.gpus=4", "parallel.tp=2", "parallel.sequence=true", *HALF), 1e-3),
]


@pytest.mark.parametrize(("words", "apart"), ROUTES)
def test_each_route_trains_the_curve_of_one_process(ranks: RankPool, tmp_path: Path, words: Words, apart: float) -> None:
    job = ranks.train(tmp_path / "run", *BASE, *words)
    losses, norms = reference_curve((*BASE, *(word for word in words if not word.startswith(("cluster.", "parallel.")))))
    assert job.figures("loss") == pytest.approx(losses, abs=apart, rel=0)
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=1e-2 if apart > 1e-5 else 2e-5)
    assert not differing_messages(job.folder)
    check_memory(job.folder)


def test_servers_resume_in_other_layouts_and_others_in_theirs(ranks: RankPool, tmp_path: Path) -> None:
    """A server saves what it steps, and reads its part of what another layout has saved."""
    words = (*BASE, "log.ledger=false", "checkpoint.resume=auto", "checkpoint.keep=9", "optim.warmup=0", "optim.schedule=constant")
    for steps, route in ((2, TWO_SERVERS), (4, LEVELS), (7, SERVER)):
        job = ranks.train(tmp_path / "run", *words, "cluster.gpus=4", *route, f"train.steps={steps}")
    losses, _ = reference_curve((*BASE, "optim.warmup=0", "optim.schedule=constant"))
    assert [row["loss"] for row in job.rows] == pytest.approx(losses, abs=1e-5, rel=0)
