"""Moments in bfloat16: layouts train the curve of an optimizer of few lines whose moments are rounded, hold what is planned, and resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")

from distrain.tests.fakes.one_process import reference_curve, reference_moments  # noqa: E402
from distrain.tests.fakes.trained_runs import differing_messages, read_run  # noqa: E402
from distrain.trainer.loop.checkpoint import CheckpointReader, find_newest, whole_slice  # noqa: E402
from distrain.trainer.plan.plan import make_plan  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

    from distrain.tests.fakes.rank_pool import RankPool

Words = tuple[str, ...]

DIFFERING = 0.1  # share of bf16 moments: where sums in another order round otherwise, later gradients differ too

BASE = (
    *("quickstart", "data=synthetic", "train.seq=32", "train.evaluate.every=0", "log.every=1", "log.ledger=true"),
    *("train.clip=0.5", "train.microbatch=1", "train.precision=fp32", "parallel.zero=0", "optim.lr=3e-3", "optim.warmup=2"),
    *("optim.moments=bf16", "train.steps=4"),
)
GPT = ("model=tiny", "model.layers=2", "model.tied=true", "model.dropout=0.1", "train.batch=4")
LLAMA = ("model=tiny_llama", "model.layers=2", "train.batch=4")
MOE = ("model=tiny_moe", "model.layers=2", "train.batch=4")
LONG, NEAREST, MUON, HALF = "train.steps=20", "optim.rounding=nearest", "optim.name=muon", "train.precision=bf16"
SGD = ("optim.name=sgd", "optim.momentum=0.9", "optim.lr=0.03")

# fmt: off
LAYOUTS: list[tuple[Words, Words, float]] = [  # the curve, the layout, the largest difference of a loss
    ((*GPT, LONG),                ("cluster.gpus=1",),                                                                      1e-5),
    ((*GPT, "train.batch=6"),     ("cluster.gpus=3", "parallel.zero=2", "parallel.bucket=20000"),                           1e-5),
    ((*GPT, LONG),                ("cluster.gpus=2", "parallel.pp=2", "engine=native"),                                     1e-5),
    ((*LLAMA, NEAREST),           ("cluster.gpus=2", "parallel.zero=1"),                                                    1e-5),
    ((*LLAMA, "model.ffn=190"),   ("cluster.gpus=4", "parallel.tp=4", "parallel.sequence=true"),                            1e-5),  # padded
    ((*LLAMA,),                   ("cluster.gpus=8", "parallel.zero=1", "parallel.shard=2", "parallel.tp=2", "parallel.cp=2"), 1e-5),
    ((*MOE, "model.shared_experts=1"), ("cluster.gpus=4", "parallel.zero=3", "parallel.ep=2"),                              1e-5),
    ((*LLAMA,),                   ("cluster.gpus=2", "parallel.zero=1", "parallel.offload.optimizer=true"),                 1e-5),
    ((*LLAMA, *SGD),              ("cluster.gpus=4", "parallel.zero=3", "parallel.tp=2"),                                   1e-5),
    ((*MOE, MUON, "model.dense_layers=1"), ("cluster.gpus=4", "parallel.zero=1", "parallel.ep=2"),                          1e-5),
    ((*LLAMA, MUON, NEAREST, "optim.muon.nesterov=false"), ("cluster.gpus=4", "parallel.zero=3", "parallel.tp=2"),          1e-5),
    (("model=tiny_hybrid", "model.layers=2", "train.batch=4"), ("cluster.gpus=4", "parallel.zero=3", "parallel.tp=2"),      1e-5),
    ((*LLAMA, HALF),              ("cluster.gpus=2", "parallel.zero=2"),                                                    1e-3),
]
# fmt: on


@pytest.mark.parametrize(("curve", "layout", "apart"), LAYOUTS)
def test_a_layout_trains_the_curve_of_rounded_moments(ranks: RankPool, tmp_path: Path, curve: Words, layout: Words, apart: float) -> None:
    """Nearly all of its moments are the reference's to the bit; float32 numbers that differ in their last bits may round otherwise."""
    words = (*BASE, *curve)
    losses, norms = reference_curve(words)
    job = ranks.train(tmp_path / "run", *words, *layout)
    assert job.figures("loss") == pytest.approx(losses, abs=apart, rel=0)
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=2e-5 if apart < 1e-5 else 1e-2)
    assert not differing_messages(job.folder)
    assert differing_share(job.folder, reference_moments(words)) < (DIFFERING if apart < 1e-4 else 1)
    run = read_run(job.folder)
    plan, held = make_plan(run), json.loads((job.folder / "measured.json").read_text())["ranks"]
    assert plan.memory is not None
    for at, stage in enumerate(plan.memory.stages):
        measured = held[at * len(held) // run.parallel.pp :][: len(held) // run.parallel.pp]
        planned, kind = (
            (stage.bytes.optimizer, "optimizer") if plan.memory.host is None else (sum(vars(plan.memory.host.rank).values()), "host")
        )
        assert max(each[kind] for each in measured) == pytest.approx(planned, rel=3e-3)  # counts of steps, padding


def differing_share(folder: Path, expected: dict[tuple[str, str], Tensor]) -> float:
    """The share of the elements of all moments in a run's last checkpoint that are not as expected."""
    checkpoint = find_newest(folder / "checkpoints").checkpoint
    assert checkpoint is not None
    reader = CheckpointReader(checkpoint)
    rows = [row for row in checkpoint.manifest.tensors if row.kind != "weight"]
    assert {(row.kind, row.name) for row in rows} == expected.keys()
    saved = [(reader.read(whole_slice(row.name, row.kind, row.shape)), expected[row.kind, row.name]) for row in rows]
    differ = sum(int((one.float() != other).sum()) for one, other in saved)
    return differ / sum(one.numel() for one, _ in saved)


def test_each_choice_leaves_moments_of_its_own() -> None:
    """So a row above can fail: of other random bits, or none, half of the moments round otherwise."""
    words = (*BASE, *LLAMA)
    one, other, nearest = (reference_moments((*words, *more)) for more in ((), ("train.seed=1235",), (NEAREST,)))
    for each in (other, nearest):
        assert sum(int((one[key] != each[key]).sum()) for key in one) > 0.3 * sum(moment.numel() for moment in one.values())


def test_a_run_resumes_in_another_layout_and_with_moments_of_another_type(ranks: RankPool, tmp_path: Path) -> None:
    """From shards of buckets to rows and stages on the same curve; to float32 and back near it, which a line says. A checkpoint is as large
    as planned, and has moments in bfloat16 alone."""
    words = (*BASE, *LLAMA, "checkpoint.every=2", "checkpoint.keep=9", "log.ledger=false")
    whole = ranks.train(tmp_path / "run", *words, "cluster.gpus=2", "parallel.zero=1")
    losses = wide = whole.figures("loss")
    plan = make_plan(read_run(whole.folder))
    assert plan.run is not None
    saved = whole.folder / "checkpoints" / "step_2"
    assert sum(each.stat().st_size for each in saved.glob("*.safetensors")) == pytest.approx(plan.run.checkpoint_bytes, rel=0.03)
    kinds = {(each["kind"], each["dtype"]) for each in json.loads((saved / "manifest.json").read_text())["tensors"]}
    assert kinds == {("weight", "float32"), ("exp_avg", "bfloat16"), ("exp_avg_sq", "bfloat16")}
    for name, begin, steps, layout, says in (
        ("rows", 2, 4, ("cluster.gpus=4", "parallel.zero=3", "parallel.pp=2"), ()),
        ("wide", 2, 6, ("cluster.gpus=2", "optim.moments=fp32", "engine=zero"), ("optim.moments bf16 -> fp32", "are widened to fp32")),
        ("narrow", 4, 6, ("cluster.gpus=1",), ("optim.moments fp32 -> bf16", "are rounded to the nearest bf16")),
    ):
        shutil.copytree(tmp_path / ("wide" if name == "narrow" else "run"), tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / f"step_{begin + 2}")
        resumed = ranks.train(tmp_path / name, *words, "checkpoint.resume=must", f"train.steps={steps}", *layout)
        text = "\n".join(resumed.lines)
        assert all(each in text for each in (f"resumes from step {begin}", *says)), text
        if name == "rows":
            assert resumed.figures("loss") == pytest.approx(losses, abs=1e-5, rel=0)
        if name == "narrow":  # a curve of rounded moments from step 5 on
            assert resumed.figures("loss") == pytest.approx(wide, abs=1e-3, rel=0)
        wide = resumed.figures("loss")
