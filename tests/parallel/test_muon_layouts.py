"""Muon: layouts train the curve of torch.optim.Muon in one process, hold and send what is planned, and resume in other layouts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")

from torch.optim._muon import _zeropower_via_newtonschulz  # noqa: E402

from distrain.tests.fakes.one_process import reference_curve  # noqa: E402
from distrain.tests.fakes.torch_muon import MATRICES  # noqa: E402
from distrain.tests.fakes.trained_runs import differing_messages, read_run  # noqa: E402
from distrain.trainer.engines.native.newton_schulz import EPS, A, B, C, orthogonalise_update, rate_factor  # noqa: E402
from distrain.trainer.plan.plan import make_plan  # noqa: E402

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

Words = tuple[str, ...]

BASE = (
    *("quickstart", "data=synthetic", "train.seq=32", "train.evaluate.every=0", "log.every=1", "log.ledger=true", "checkpoint.final=false"),
    *("train.clip=0.5", "train.microbatch=1", "train.precision=fp32", "parallel.zero=0", "optim=muon", "optim.lr=3e-3", "optim.warmup=2"),
)
GPT = ("model=tiny", "model.layers=2", "model.tied=true", "model.dropout=0.1", "train.batch=4")
LLAMA = ("model=tiny_llama", "model.layers=2", "train.batch=4")
MLA = ("model=tiny_mla", "model.layers=2", "train.batch=4")
MOE = ("model=tiny_moe", "model.layers=2", "train.batch=4")
HYBRID = ("model=tiny_hybrid", "model.layers=2", "train.batch=4")
LONG, SHORT = "train.steps=20", "train.steps=3"


@pytest.mark.parametrize("shape", [(48, 48), (24, 80), (80, 24)])
def test_a_matrix_is_made_orthogonal_as_by_torch(shape: tuple[int, int]) -> None:
    """In bfloat16, which torch always takes, to the bit where none of the two is transposed; in float32 singular values are near 1."""
    update = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    theirs = _zeropower_via_newtonschulz(update, (A, B, C), 5, EPS)
    assert torch.equal(orthogonalise_update(update.bfloat16(), 5), theirs)
    made = orthogonalise_update(update, 5)
    assert (made - theirs).abs().max() < 0.05
    values = torch.linalg.svdvals(made)
    assert 0.6 < values.min() <= values.max() < 1.3
    left, _, right = torch.linalg.svd(update, full_matrices=False)
    assert (made - left @ right).norm() < 0.3 * made.norm()


def test_a_zero_update_stays_zero() -> None:
    assert not orthogonalise_update(torch.zeros(8, 4), 5).any()


def test_a_rate_is_adjusted_as_by_torch() -> None:
    """Torch's matrices have outputs as rows."""
    from torch.optim._muon import _adjust_lr

    for inputs, outputs in ((64, 256), (256, 64), (64, 64)):
        for adjust in ("original", "match_rms_adamw"):
            assert rate_factor(inputs, outputs, adjust) == pytest.approx(_adjust_lr(1.0, adjust, torch.Size((outputs, inputs))))


# fmt: off
HALF = "train.precision=bf16"
LAYOUTS: list[tuple[Words, Words, float]] = [  # the curve, the layout, the largest difference of a loss
    ((*GPT, LONG),   ("cluster.gpus=1",), 3e-6),
    ((*LLAMA, LONG), ("cluster.gpus=2", "parallel.zero=1"), 3e-6),
    ((*LLAMA, SHORT, "model.ffn=190"), ("cluster.gpus=4", "parallel.tp=4", "parallel.sequence=true"), 3e-6),  # padded
    ((*LLAMA, SHORT), ("cluster.gpus=4", "parallel.zero=1", "parallel.pp=2", "parallel.schedule=zb_h1"), 3e-6),
    ((*GPT, SHORT, "model.layers=1", "train.batch=8"), ("cluster.gpus=8",), 3e-6),  # more ranks than matrices
    ((*GPT, SHORT, "train.batch=6"), ("cluster.gpus=3", "parallel.zero=2", "parallel.bucket=20000"), 3e-6),
    ((*HYBRID, SHORT), ("cluster.gpus=4", "parallel.zero=1", "parallel.ep=2", "parallel.tp=2", "parallel.sequence=true"), 3e-6),
    ((*GPT, SHORT, "train.batch=6", "optim.muon.nesterov=false"), ("cluster.gpus=3", "parallel.zero=3"), 3e-6),
    ((*LLAMA, SHORT, "model.layers=1", "optim.muon.adjust_lr_fn=original"),
     ("cluster.gpus=8", "parallel.zero=1", "parallel.shard=2", "parallel.tp=2", "parallel.cp=2"), 3e-6),
    ((*MOE, SHORT, "model.dense_layers=1", "model.shared_experts=1", "optim.muon.ns_steps=3"),
     ("cluster.gpus=4", "parallel.zero=3", "parallel.ep=2"), 3e-6),
    ((*MOE, SHORT, "model.layers=3", "model.dense_layers=2"), ("cluster.gpus=4", "parallel.ep=2"), 3e-6),
    ((*MLA, SHORT), ("cluster.gpus=3", "parallel.tp=3", "parallel.dp=1", "parallel.sequence=false"), 3e-6),  # a padded head; latents whole
    ((*LLAMA, SHORT, HALF), ("cluster.gpus=2", "parallel.zero=1"), 1e-3),
    ((*LLAMA, SHORT, HALF, "train.gradients=fp32"), ("cluster.gpus=2", "parallel.tp=2"), 1e-3),
]
# fmt: on


@pytest.mark.parametrize(("curve", "layout", "apart"), LAYOUTS)
def test_a_layout_trains_the_curve_of_torchs_muon(ranks: RankPool, tmp_path: Path, curve: Words, layout: Words, apart: float) -> None:
    losses, norms = reference_curve((*BASE, *curve))
    job = ranks.train(tmp_path / "run", *BASE, *curve, *layout)
    found = job.figures("loss")
    assert found == pytest.approx(losses, abs=apart, rel=0)
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=2e-5 if apart < 1e-5 else 1e-2)
    assert not differing_messages(job.folder)
    run = read_run(job.folder)
    plan, held = make_plan(run), json.loads((job.folder / "measured.json").read_text())["ranks"]
    assert plan.memory is not None
    for at, stage in enumerate(plan.memory.stages):
        measured = held[at * len(held) // run.parallel.pp :][: len(held) // run.parallel.pp]
        assert max(each["optimizer"] for each in measured) == pytest.approx(stage.bytes.optimizer, rel=2e-3)  # Adam's counts, padding


def test_a_run_resumes_in_another_layout_with_its_momenta(ranks: RankPool, tmp_path: Path) -> None:
    """From shards of experts and of buckets to rows, stages and blocks, and back to one process; a checkpoint is as large as planned."""
    words = (*BASE, *MOE, "checkpoint.every=2", "checkpoint.keep=9", "train.steps=4", "log.ledger=false")
    whole = ranks.train(tmp_path / "run", *words, "cluster.gpus=4", "parallel.zero=1", "parallel.ep=2")
    losses = whole.figures("loss")
    plan = make_plan(read_run(whole.folder))
    assert plan.run is not None
    files = (whole.folder / "checkpoints" / "step_2").glob("*.safetensors")
    assert sum(each.stat().st_size for each in files) == pytest.approx(plan.run.checkpoint_bytes, rel=0.03)  # and headers
    manifest = json.loads((whole.folder / "checkpoints" / "step_2" / "manifest.json").read_text())
    kinds = {(each["kind"], each["name"]) for each in manifest["tensors"]}
    assert {name for kind, name in kinds if kind == "momentum_buffer"} == {name for _, name in kinds if MATRICES.fullmatch(name)}
    assert {name for kind, name in kinds if kind == "exp_avg"} == {name for _, name in kinds if not MATRICES.fullmatch(name)}
    for name, layout in (("rows", ("cluster.gpus=4", "parallel.zero=3", "parallel.pp=2")), ("one", ("cluster.gpus=1",))):
        shutil.copytree(whole.folder, tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step_4")
        resumed = ranks.train(tmp_path / name, *words, "checkpoint.resume=must", *layout)
        assert any("resumes from step 2" in line for line in resumed.lines)
        assert resumed.figures("loss") == pytest.approx(losses, abs=1e-5, rel=0)
