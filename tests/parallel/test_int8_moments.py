"""Moments in 8 bits: layouts train the curve of an optimizer of few lines whose moments are quantized, hold what is planned, and resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")

from distrain.tests.fakes import one_process  # noqa: E402
from distrain.tests.fakes.one_process import reference_curve, reference_moments, with_decay  # noqa: E402
from distrain.tests.fakes.trained_runs import differing_messages, read_run  # noqa: E402
from distrain.trainer.loop.checkpoint import CheckpointReader, find_newest, whole_slice  # noqa: E402
from distrain.trainer.plan.plan import make_plan  # noqa: E402

if TYPE_CHECKING:
    from torch import nn

    from distrain.tests.fakes.rank_pool import RankPool
    from distrain.trainer.spec.run import Run

Words = tuple[str, ...]

BASE = (
    *("quickstart", "data=synthetic", "train.seq=32", "train.evaluate.every=0", "log.every=1", "log.ledger=true", "optim.moments=int8"),
    *("train.clip=0.5", "train.microbatch=1", "train.precision=fp32", "parallel.zero=0", "optim.lr=3e-3", "optim.warmup=2"),
)
GPT = ("model=tiny", "model.layers=2", "train.batch=4", "train.steps=6")
LLAMA = ("model=tiny_llama", "model.layers=2", "model.ffn=190", "train.batch=4", "train.steps=6")
MOE = ("model=tiny_moe", "model.layers=2", "train.batch=4", "train.steps=4")
MUON, HALF = "optim.name=muon", "train.precision=bf16"
SGD = ("optim.name=sgd", "optim.momentum=0.9", "optim.lr=0.03")
WHOLE, CUT = 1e-5, 5e-4  # differences of losses where ranks have whole weights, and parts of them, whose blocks begin elsewhere

# fmt: off
LAYOUTS: list[tuple[Words, Words, float]] = [  # the curve, the layout, the largest difference of a loss
    (GPT,           ("cluster.gpus=1",),                                                                        WHOLE),
    (GPT,           ("cluster.gpus=2", "parallel.pp=2", "engine=native"),                                       WHOLE),
    (GPT,           ("cluster.gpus=2", "parallel.reduce=server", "parallel.servers=2"),                         CUT),
    (LLAMA,         ("cluster.gpus=2", "parallel.zero=1", "parallel.bucket=20000"),                             CUT),
    (LLAMA,         ("cluster.gpus=4", "parallel.zero=2", "parallel.tp=2", "parallel.sequence=true"),           CUT),
    ((*LLAMA, *SGD), ("cluster.gpus=4", "parallel.zero=3", "parallel.pp=2"),                                    CUT),
    (MOE,           ("cluster.gpus=4", "parallel.zero=1", "parallel.ep=2"),                                     CUT),
    ((*LLAMA, MUON), ("cluster.gpus=2", "parallel.zero=3"),                                                     CUT),
    ((*LLAMA, HALF), ("cluster.gpus=2", "parallel.zero=2"),                                                     2e-3),
]
# fmt: on


@pytest.mark.parametrize(("curve", "layout", "apart"), LAYOUTS)
def test_a_layout_trains_the_curve_of_quantized_moments(ranks: RankPool, tmp_path: Path, curve: Words, layout: Words, apart: float) -> None:
    """With messages and bytes of optimizer states as planned. Where a rank has whole weights nearly all moments are the reference's."""
    words = (*BASE, *curve)
    losses, _ = reference_curve(words)
    job = ranks.train(tmp_path / "run", *words, *layout)
    assert job.figures("loss") == pytest.approx(losses, abs=apart, rel=0)
    assert not differing_messages(job.folder)
    if apart == WHOLE:
        expected = reference_moments(words)
        found = saved_moments(job.folder)
        assert found.keys() == expected.keys()
        differ = sum(int(((found[key] - expected[key]).abs() > 1e-3 * expected[key].abs()).sum()) for key in found)
        assert differ < 0.05 * sum(each.numel() for each in found.values())
    run = read_run(job.folder)
    plan, held = make_plan(run), json.loads((job.folder / "measured.json").read_text())["ranks"]
    assert plan.memory
    for at, stage in enumerate(plan.memory.stages):
        measured = held[at * len(held) // run.parallel.pp :][: len(held) // run.parallel.pp]
        counts = 4 * 60  # a count of steps for each bucket or weight
        assert 0 <= max(each["optimizer"] for each in measured) - stage.bytes.optimizer <= counts


def saved_moments(folder: Path) -> dict[tuple[str, str], Any]:
    checkpoint = find_newest(folder / "checkpoints").checkpoint
    assert checkpoint is not None
    reader = CheckpointReader(checkpoint)
    rows = [row for row in checkpoint.manifest.tensors if row.kind != "weight"]
    return {(row.kind, row.name): reader.read(whole_slice(row.name, row.kind, row.shape)) for row in rows}


def test_quantized_moments_train_nearly_the_curve_of_float32() -> None:
    """So the rows above would find moments that stay float32."""
    wide, narrow = (reference_curve((*BASE, *GPT, *more))[0] for more in (("optim.moments=fp32",), ()))
    apart = max(abs(one - other) for one, other in zip(wide, narrow, strict=True))
    assert 2 * WHOLE < apart < 5e-3


def test_a_run_resumes_bit_for_bit_and_in_another_layout_nearly(ranks: RankPool, tmp_path: Path) -> None:
    """From float32 numbers that a checkpoint has: the same layout quantizes them to the same bits. To float32 and back, which a line
    says."""
    words = (*BASE, *LLAMA, "checkpoint.every=3", "checkpoint.keep=9", "log.ledger=false")
    whole = ranks.train(tmp_path / "run", *words, "cluster.gpus=2", "parallel.zero=1")
    losses = whole.figures("loss")
    plan = make_plan(read_run(whole.folder))
    assert plan.run is not None
    saved = whole.folder / "checkpoints" / "step_3"
    assert sum(each.stat().st_size for each in saved.glob("*.safetensors")) == pytest.approx(plan.run.checkpoint_bytes, rel=0.03)
    kinds = {(each["kind"], each["dtype"]) for each in json.loads((saved / "manifest.json").read_text())["tensors"]}
    assert kinds == {("weight", "float32"), ("exp_avg", "float32"), ("exp_avg_sq", "float32")}
    for name, apart, layout, says in (
        ("same", 0, ("cluster.gpus=2", "parallel.zero=1"), ()),
        ("rows", CUT, ("cluster.gpus=4", "parallel.zero=3", "parallel.pp=2"), ()),
        ("wide", CUT, ("cluster.gpus=2", "optim.moments=fp32", "engine=zero"), ("optim.moments int8 -> fp32", "are widened to fp32")),
    ):
        shutil.copytree(tmp_path / "run", tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step_6")
        resumed = ranks.train(tmp_path / name, *words, "checkpoint.resume=must", *layout)
        text = "\n".join(resumed.lines)
        assert all(each in text for each in ("resumes from step 3", *says)), text
        assert resumed.figures("loss") == pytest.approx(losses, abs=apart, rel=0)
        if name == "same":
            one, other = saved_moments(whole.folder), saved_moments(resumed.folder)
            assert all(one[key].equal(other[key]) for key in one)


def test_torchaos_optimizer_trains_nearly_the_same_curve() -> None:
    """AdamW8bit, a program that is not ours. It leaves weights of fewer than 4,096 elements in float32."""
    optimizers = pytest.importorskip("torchao.optim")
    words = (*BASE, *GPT)
    own, wide = reference_curve(words)[0], reference_curve((*words, "optim.moments=fp32"))[0]

    def build(run: Run, module: nn.Module) -> Any:
        named, optim = dict(module.named_parameters()), run.optim
        decayed = with_decay(named)
        groups = [
            {"params": [each for name, each in named.items() if (name in decayed) == decays], "weight_decay": optim.weight_decay * decays}
            for decays in (True, False)
        ]
        return TensorRates(optimizers.AdamW8bit(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.compile", lambda program, **_: program)  # which takes it two minutes
        patch.setattr(one_process, "plain_optimizer", build)
        theirs = reference_curve((*words, "name=torchao"))[0]  # another run than the one that is cached
    assert own == pytest.approx(theirs, abs=5e-4, rel=0)
    assert theirs != pytest.approx(wide, abs=1e-5, rel=0)


class TensorRates:
    """torchao's optimizer, whose rate is a tensor that must stay the same object."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.param_groups = [{"lr": group["lr"]} for group in optimizer.param_groups]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        for group, own in zip(self.optimizer.param_groups, self.param_groups, strict=True):
            group["lr"].fill_(own["lr"])
        self.optimizer.step()

    def moments(self) -> dict[tuple[str, str], Any]:
        return {}
