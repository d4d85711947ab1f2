"""Compressed gradients: PyTorch's powerSGD_hook sums as we do, layouts train the curve that one process simulates, hold and send what is
planned, and resume in other layouts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")  # simulated products of this size take longer on two

from msgspec.json import decode  # noqa: E402

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.tests.fakes.deadline import DEADLINE  # noqa: E402
from distrain.tests.fakes.one_process import reference_curve  # noqa: E402
from distrain.tests.fakes.trained_runs import check_simulated, differing_messages, read_run  # noqa: E402
from distrain.trainer.engines.native.data_parallel.gradient_compression import orthogonalise  # noqa: E402
from distrain.trainer.loop.reference_curves.compressed_gradients import compressed_curve, compressed_gradients  # noqa: E402
from distrain.trainer.plan.plan import make_plan  # noqa: E402
from distrain.trainer.spec.run import Run  # noqa: E402

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

Words = tuple[str, ...]

BASE = (
    *("quickstart", "model=tiny", "model.layers=2", "data=synthetic", "train.steps=6", "train.seq=32", "train.batch=4"),
    *("train.microbatch=1", "train.clip=0.5", "train.precision=fp32", "train.evaluate.every=0", "checkpoint.every=0", "optim.lr=1e-3"),
    *("optim.warmup=2", "parallel.zero=0", "log.every=1", "log.ledger=true", "parallel.compress.name=powersgd", "parallel.compress.rank=2"),
)
TWO, FOUR = "cluster.gpus=2", "cluster.gpus=4"
SAVES = ("checkpoint.every=2", "checkpoint.keep=9")


# The sum of one bucket


@cache
def differences() -> dict[str, float]:
    script = Path(__file__).parents[1] / "rank_programs" / "compression_ranks.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=DEADLINE, env=environment)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, float] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("fact", ["gradients", "errors"])
def test_pytorchs_hook_sums_the_same_gradients_alike(fact: str) -> None:
    """Three ranks, six steps with warm factors and errors; the largest difference was 5e-6 of the largest value."""
    assert differences()[fact] < 5e-5


def test_ranks_may_share_their_errors() -> None:
    """Training goes on with the mean of all errors as with each rank's own; 4e-7 apart."""
    assert differences()["errors shared"] < 1e-5


def test_a_step_that_is_not_finite_is_forgotten() -> None:
    assert differences()["forgotten"] == 0.0


def test_a_right_factor_of_a_gradient_that_is_zero_stays() -> None:
    """Else it would be zero for ever, and so would the gradient."""
    assert differences()["zero stays"] < 1e-5


@pytest.mark.parametrize("scale", [1.0, 1e-15])
def test_columns_are_made_orthonormal_and_span_the_same_space(scale: float) -> None:
    columns = torch.randn(3, 40, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * torch.logspace(0, -9, 6) * scale
    made = orthogonalise(columns.float()).double()
    assert (made.mT @ made - torch.eye(6, dtype=torch.float64)).abs().max() < 1e-6
    expected = torch.linalg.qr(columns).Q
    assert (made @ made.mT - expected @ expected.mT).abs().max() < 1e-6


def test_columns_that_nearly_depend_on_each_other_are_made_orthonormal_too() -> None:
    """One projection leaves a thousandth of the others in each."""
    draw = torch.Generator().manual_seed(1)
    made = orthogonalise(torch.randn(3, 40, 1, generator=draw) + 1e-4 * torch.randn(3, 40, 6, generator=draw)).double()
    assert (made.mT @ made - torch.eye(6, dtype=torch.float64)).abs().max() < 1e-6


def test_a_column_that_depends_on_the_others_becomes_zero() -> None:
    """And so does a matrix of zeros: nothing is divided by what rounding leaves."""
    columns = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(1))
    columns[0, :, 2] = 3 * columns[0, :, 0] - columns[0, :, 1]
    columns[1] = 0
    made = orthogonalise(columns)
    assert made[0].norm(dim=0).tolist() == pytest.approx([1, 1, 0], abs=1e-6)
    assert made[0, :, 2].tolist() == [0.0] * 40
    assert not made[1].any()


MUP = ("optim.mup=16", "optim.moments=bf16", "model.tied=false")
STEPPED_BIASES = ("train.steps=4", "model.router.score=sigmoid", "model.router.bias=true", "model.router.bias_rate=0.01")

# Whole runs

# fmt: off
LAYOUTS: list[tuple[Words, float]] = [  # the layout and what else differs, the largest difference of a loss
    ((TWO, "model.dropout=0.1", *SAVES),                                                             1e-5),
    ((FOUR, "parallel.compress.start=3", "parallel.bucket=20000"),                                    1e-5),
    ((FOUR, "parallel.tp=2", "parallel.sequence=true"),                                               1e-5),
    ((FOUR, "parallel.pp=2", "optim=sgd", "optim.lr=0.03", "parallel.overlap.data=false"),            1e-5),
    ((FOUR, "parallel.ep=2", "model=tiny_moe", "model.layers=2"),                                     1e-5),
    ((FOUR, "parallel.ep=2", "model=tiny_hybrid", "model.layers=2"),                                  1e-5),
    ((TWO, "model=tiny_moe", "model.layers=2", *STEPPED_BIASES),                                       1e-5),
    ((FOUR, "parallel.tp=2", *MUP, *SAVES),                                           1e-5),
    ((FOUR, "parallel.cp=2", "train.precision=bf16", "train.gradients=fp32"),                         2e-3),
]
# fmt: on


@pytest.mark.parametrize(("words", "apart"), LAYOUTS)
def test_a_layout_trains_by_compressed_gradients(ranks: RankPool, tmp_path: Path, words: Words, apart: float) -> None:
    """In fp32 losses were at most 7e-7 apart, norms 1e-5 of themselves, weights 4e-6; bf16's, whose forward rounds, 4e-4."""
    job = ranks.train(tmp_path / "run", *BASE, *words)
    expected = compressed_gradients(str(job.folder))
    check_simulated(job, expected, apart)
    assert not differing_messages(job.folder)
    run = read_run(job.folder)
    plan, held = make_plan(run), json.loads((job.folder / "measured.json").read_text())["ranks"]
    assert plan.memory is not None
    stages = [held[at * len(held) // run.parallel.pp :][: len(held) // run.parallel.pp] for at in range(run.parallel.pp)]
    for stage, measured in zip(plan.memory.stages, stages, strict=True):
        messages = stage.bytes.buffers - max(each["buffers"] for each in measured)  # of the pipeline, which nobody holds between steps
        assert messages == (2 * 4 * 32 * run.model.hidden if run.parallel.pp > 1 else 0)
        assert max(each["gradients"] for each in measured) == stage.bytes.gradients


def test_each_choice_trains_a_curve_of_its_own() -> None:
    """So a row above can fail: no two of these curves are as near as an engine's must be."""
    layouts = [
        *((TWO,), (TWO, "parallel.compress.rank=4"), (TWO, "parallel.compress.start=2"), (TWO, "checkpoint.every=2")),
        (FOUR, "parallel.tp=2"),
    ]
    curves = [compressed_curve(load_recipe(BASE[0], [*BASE[1:], *layout])).losses for layout in layouts]
    curves.append(reference_curve(BASE)[0])
    for at, one in enumerate(curves):
        assert all(max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-4 for other in curves[:at])


def test_a_run_resumes_in_another_layout_with_the_errors_that_were_saved(ranks: RankPool, tmp_path: Path) -> None:
    """Four data-parallel ranks go on with the curve that two began: of the errors the sum alone matters. Beside the whole run, one with
    other stages; with other shards the curve is another, and with one replica the errors are dropped, which a line says. Steps are
    counted from the run's first: after the resume none sends gradients whole."""
    words = (*BASE, *SAVES, "log.ledger=false", "parallel.compress.start=1")
    whole = ranks.train(tmp_path / "run", *words, TWO)
    losses = whole.figures("loss")
    for name, layout in (
        ("more", (FOUR,)),
        ("stages", (FOUR, "parallel.pp=2")),
        ("shards", (FOUR, "parallel.tp=2")),
        ("one", ("cluster.gpus=1",)),
    ):
        shutil.copytree(whole.folder, tmp_path / name)
        for step in (4, 6):
            shutil.rmtree(tmp_path / name / "checkpoints" / f"step_{step}")
        resumed = ranks.train(tmp_path / name, *words, "checkpoint.resume=must", *layout)
        assert any("resumes from step 2" in line for line in resumed.lines)
        apart = max(abs(a - b) for a, b in zip(losses, resumed.figures("loss"), strict=True))
        assert (apart < 1e-5) == (name in ("more", "stages")), (name, apart)
        assert apart < 0.05
        assert any("is dropped: gradients travel whole now" in line for line in resumed.lines) == (name == "one")


def test_a_checkpoint_is_as_large_as_planned_and_holds_errors(ranks: RankPool, tmp_path: Path) -> None:
    job = ranks.train(tmp_path / "run", *BASE, FOUR, "parallel.tp=2", "train.steps=3")
    run = decode((job.folder / "run.json").read_bytes(), type=Run)
    files = (job.folder / "checkpoints" / "step_3").glob("*.safetensors")
    plan = make_plan(run)
    assert plan.run is not None
    assert sum(each.stat().st_size for each in files) == pytest.approx(plan.run.checkpoint_bytes, rel=0.02)  # and headers
