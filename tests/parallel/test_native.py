"""Engine `native`: any legal order of actions, layers as the user gives them, bytes as planned, and each product computed once."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from hypothesis import Phase, given, settings  # noqa: E402
from msgspec.json import decode  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.tests.fakes.action_orders import Lists, Pipeline, action_orders  # noqa: E402
from distrain.tests.fakes.deadline import DEADLINE  # noqa: E402
from distrain.tests.fakes.one_process import reference_curve  # noqa: E402
from distrain.trainer.layers.weight_gradients import WeightGradients, defer_weight_gradients  # noqa: E402
from distrain.trainer.models.build import build_model  # noqa: E402
from distrain.trainer.plan.compare_rank_messages import compare_rank_messages  # noqa: E402
from distrain.trainer.plan.layout.action_csv import write_action_csv  # noqa: E402
from distrain.trainer.plan.plan import make_plan  # noqa: E402
from distrain.trainer.spec.run import Run  # noqa: E402

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

Words = tuple[str, ...]

BASE = (
    *("quickstart", "data=synthetic", "train.steps=2", "train.seq=16", "train.evaluate.every=0", "log.every=1", "optim.warmup=0"),
    *("optim.lr=1e-3", "checkpoint.final=false", "train.clip=0.5", "train.microbatch=1", "train.precision=fp32"),
)
GPT = ("model=tiny", "model.layers=2", "model.tied=true", "model.dropout=0.1", "train.batch=4")
LLAMA = ("model=tiny_llama", "model.layers=2", "model.tied=false", "train.batch=4")
FOUR, SIX = "model.layers=4", "model.layers=6"
MOE = ("model=tiny_moe", "model.layers=2", "train.batch=4")
NATIVE = "engine=native"
LONGER = "train.steps=3"  # the third loss follows from moments that went on from step to step
HALF = ("train.precision=bf16", "train.gradients=fp32")


def check_curve(ranks: RankPool, folder: Path, curve: Words, *layout: str) -> None:
    """Train a layout, and hold its curve to that of plain torch in one process."""
    losses, norms = reference_curve((*BASE, *curve))
    job = ranks.train(folder, *BASE, *curve, *layout)
    assert job.figures("loss") == pytest.approx(losses, abs=3e-6, rel=0)
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=2e-5)


def check_messages(folder: Path) -> None:
    """Hold the messages that a run counted to its plan."""
    run = decode((folder / "run.json").read_bytes(), type=Run)
    rows = json.loads((folder / "ledger.json").read_text())["ranks"]
    assert not [line for rank, each in enumerate(rows) for line in compare_rank_messages(run, rank, each) if line.verdict == "differs"]


# fmt: off
ORDERED = [  # curve, stages, chunks, folded, further keys
    ((*LLAMA, SIX), 2, 3, False, ()),
    ((*GPT, SIX),   3, 2, True,  ("parallel.recompute=full",)),
    ((*GPT, FOUR),  2, 2, False, ("parallel.tp=2", "parallel.sequence=true")),
    (GPT,           2, 1, False, ("parallel.dp=2", "parallel.zero=2")),
]
DRAWN = 2  # orders of each
# fmt: on


@pytest.mark.parametrize(("curve", "stages", "chunks", "folded", "words"), ORDERED)
def test_any_legal_order_of_actions_trains_the_curve(
    ranks: RankPool, tmp_path: Path, curve: Words, stages: int, chunks: int, folded: bool, words: Words
) -> None:
    """Forwards, backwards and weight gradients in a drawn order that their dependencies allow, from a user's file."""
    degrees = dict(word.split("=") for word in words)
    dp, inner = int(degrees.get("parallel.dp", 1)), int(degrees.get("parallel.tp", 1)) * int(degrees.get("parallel.cp", 1))
    parts, folders = 1 if folded else chunks, count()
    layout = (f"parallel.pp={stages}", f"parallel.chunks={parts}", f"cluster.gpus={stages * dp * inner}", *words, "log.ledger=true")

    @settings(max_examples=DRAWN, phases=[Phase.generate])  # a failing example says its order; to find a shorter one takes minutes
    @given(action_orders(Pipeline(stages, 4 // dp, chunks, folded)))
    def train(lists: Lists) -> None:
        folder = tmp_path / str(next(folders))
        folder.mkdir()
        file, cells = folder / "actions.csv", write_action_csv(lists, folded=folded)
        file.write_text(cells)
        check_curve(ranks, folder / "run", curve, *layout, f"parallel.schedule={file}")
        ran = json.loads((folder / "run" / "actions.json").read_text())["ranks"][:: dp * inner]
        assert [",".join(f"{each['part']}{each['kind']}{each['micro']}" for each in rows) for rows in ran] == cells.splitlines()
        times = [each for rows in ran for each in rows]  # a thread works no longer than its block takes
        assert all(0 <= each["cpu"] <= each["end"] - each["start"] + 1e-3 for each in times)

    train()
    assert next(folders) == DRAWN


@pytest.mark.parametrize(
    ("engine", "stages", "words"),
    [
        ("pipe", [1, 2, 3], ("parallel.pp=3", "cluster.gpus=3")),
        ("pipe", [1, 1, 1, 3], ("parallel.pp=2", "cluster.gpus=2", "parallel.schedule=dualpipev")),
        (NATIVE[7:], [4, 2], ("parallel.pp=2", "cluster.gpus=4", "parallel.zero=1")),
        (NATIVE[7:], [1, 2, 1, 2], ("parallel.pp=2", "cluster.gpus=2", "parallel.schedule=interleaved", "parallel.chunks=2")),
        (NATIVE[7:], [2, 2, 1, 1], ("parallel.pp=2", "cluster.gpus=2", "parallel.schedule=dualpipev")),
    ],
)
def test_stages_have_the_layers_that_the_user_gives_them(
    ranks: RankPool, tmp_path: Path, engine: str, stages: list[int], words: Words
) -> None:
    given = f"parallel.stages={stages}".replace(" ", "")
    check_curve(ranks, tmp_path / "run", (*GPT, SIX), *words, given, f"engine={engine}")
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["parallel"]["stages"] == stages


# fmt: off
APART = [
    (LLAMA, 4, ("parallel.pp=2", "parallel.zero=3", "parallel.schedule=zb_h1", "train.loss_chunks=4")),
    (MOE,   4, ("parallel.pp=2", "parallel.zero=3", "parallel.schedule=dualpipev_w", "model.tied=false", "train.batch=8", FOUR)),
]
# fmt: on


@pytest.mark.parametrize(("curve", "gpus", "words"), APART)
def test_zero_3_sums_gradients_that_are_computed_apart(ranks: RankPool, tmp_path: Path, curve: Words, gpus: int, words: Words) -> None:
    model = tuple(word for word in words if word.startswith(("train.batch", "model.")))
    check_curve(ranks, tmp_path / "run", (*curve, *model), *words, f"cluster.gpus={gpus}", NATIVE, "log.ledger=true")
    check_messages(tmp_path / "run")


# fmt: off
HYBRID = [
    (GPT,   4, ("parallel.zero=1", "parallel.shard=2")),
    (GPT,   2, ("parallel.zero=1", "parallel.shard=1")),
    (LLAMA, 4, ("parallel.zero=2", "parallel.shard=2", "parallel.cp=2")),
    (MOE,   4, ("parallel.zero=1", "parallel.shard=2", "parallel.ep=2")),
    (MOE,   4, ("parallel.zero=3", "parallel.shard=2", "parallel.ep=2", "parallel.recompute=full")),
    (MOE,   4, ("parallel.zero=3", "parallel.ep=2", "parallel.tp=2")),
    (LLAMA, 4, ("parallel.zero=3", "parallel.shard=2", "train.batch=8")),
    (GPT,   8, ("parallel.zero=3", "parallel.shard=2", "parallel.tp=2", "parallel.sequence=true")),
]
# fmt: on


@pytest.mark.parametrize(("curve", "gpus", "words"), HYBRID)
def test_zero_shards_over_some_of_the_data_parallel_ranks(ranks: RankPool, tmp_path: Path, curve: Words, gpus: int, words: Words) -> None:
    """The owners of a shard sum its gradients and step it alike; the messages of all are as planned."""
    batch = tuple(word for word in words if word.startswith("train.batch"))
    check_curve(ranks, tmp_path / "run", (*curve, *batch), *words, f"cluster.gpus={gpus}", NATIVE, "log.ledger=true")
    check_messages(tmp_path / "run")


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_padding_over_three_ranks_is_planned(ranks: RankPool, tmp_path: Path, zero: int) -> None:
    """Weights that three does not divide are padded in each message, of which ZeRO 2 and 3 send some at each of two micro-batches."""
    curve = (*(word for word in GPT if not word.startswith("train.batch")), "train.batch=6", LONGER)
    check_curve(ranks, tmp_path / "run", curve, "cluster.gpus=3", f"parallel.zero={zero}", NATIVE, "log.ledger=true")
    check_messages(tmp_path / "run")


@pytest.mark.parametrize("words", [("optim=sgd",), ("train.clip=100",), ("train.clip=0",)])
def test_gradients_are_clipped_as_by_torch(ranks: RankPool, tmp_path: Path, words: Words) -> None:
    """Torch's fused AdamW divides them itself; other optimizers are given clipped ones."""
    check_curve(ranks, tmp_path / "run", (*GPT, *words, LONGER), "cluster.gpus=2", "parallel.zero=1", NATIVE)


# fmt: off
FP16 = [
    (GPT,   ("cluster.gpus=1",)),
    (GPT,   ("cluster.gpus=2", "parallel.zero=2", "train.loss_chunks=4")),
    (LLAMA, ("cluster.gpus=4", "parallel.pp=2", "parallel.zero=1", "parallel.schedule=zb_h1")),
]
# fmt: on


@pytest.mark.parametrize(("curve", "words"), FP16)
def test_fp16_trains_the_curve_and_skips_no_step_whose_gradients_are_finite(
    ranks: RankPool, tmp_path: Path, curve: Words, words: Words
) -> None:
    """Norms are those of gradients without the loss's scale. A weight of fp16 has 11 bits: 1e-3 of a loss, 1 % of a norm."""
    losses, norms = reference_curve((*BASE, *curve))
    job = ranks.train(tmp_path, *BASE, *curve, *words, "train.precision=fp16", NATIVE)
    assert job.figures("loss") == pytest.approx(losses, abs=1e-3, rel=0)
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=1e-2)


# fmt: off
HELD = [
    (GPT,   ("cluster.gpus=2", "parallel.zero=0")),
    (LLAMA, ("cluster.gpus=2", "parallel.zero=2", "parallel.bucket=20000")),
    (GPT,   ("cluster.gpus=4", "parallel.zero=2", "parallel.tp=2", "parallel.sequence=true", "train.loss_chunks=4")),
    (LLAMA, ("cluster.gpus=2", "parallel.zero=3", "train.precision=bf16")),
    (GPT,   ("cluster.gpus=4", "parallel.pp=2", "parallel.dp=2", "parallel.zero=3", "parallel.gather=micro")),
    (LLAMA, ("cluster.gpus=4", "parallel.pp=2", "parallel.zero=3", "parallel.schedule=zb_h1", *HALF)),
    ((*GPT, SIX), ("cluster.gpus=3", "parallel.pp=3", "parallel.recompute=full")),
    ((*LLAMA, SIX), ("cluster.gpus=2", "parallel.pp=2", "parallel.schedule=interleaved", "parallel.chunks=3")),
    (GPT,   ("cluster.gpus=4", "parallel.pp=2", "parallel.tp=2", "parallel.sequence=true", "parallel.schedule=gpipe")),
    (MOE,   ("cluster.gpus=4", "parallel.ep=2", "parallel.zero=1")),
    (MOE,   ("cluster.gpus=4", "parallel.ep=2", "parallel.zero=3", "train.precision=bf16")),
    (GPT,   ("cluster.gpus=4", "parallel.zero=1", "parallel.shard=2", "train.precision=bf16")),
]
# fmt: on


@pytest.mark.parametrize(("curve", "words"), HELD)
def test_a_rank_holds_the_bytes_that_are_planned(ranks: RankPool, tmp_path: Path, curve: Words, words: Words) -> None:
    """Weights, gradients, optimizer and activations of each stage, up to the padding of buckets and rows; the curve is that of torch."""
    losses, norms = reference_curve((*BASE, *curve))
    job = ranks.train(tmp_path / "run", *BASE, *curve, *words, NATIVE)
    half = "train.precision=bf16" in words
    assert job.figures("loss") == pytest.approx(losses, abs=1e-3 if half else 3e-6, rel=0)
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=5e-3 if half else 2e-5)
    plan = make_plan(load_recipe(BASE[0], [*BASE[1:], *curve, *words, NATIVE]))
    assert plan.memory is not None
    held = json.loads((job.folder / "measured.json").read_text())["ranks"]
    each = len(held) // len(plan.memory.stages)
    for at, stage in enumerate(plan.memory.stages):
        most = {kind: max(rank[kind] for rank in held[at * each : (at + 1) * each]) for kind in held[0]}
        planned = stage.bytes
        assert most["weights"] == pytest.approx(planned.weights, abs=64)
        assert most["gradients"] == pytest.approx(planned.gradients, abs=64)
        assert most["optimizer"] == pytest.approx(planned.optimizer, abs=1024)
        activations = planned.activations + planned.logits
        if "parallel.schedule=zb_h1" in words:  # between I and W a rank holds less than whole activations, which are planned
            assert most["activations"] <= activations
        else:
            assert most["activations"] == pytest.approx(activations, rel=2e-3 if curve != MOE else 0.1)


def test_a_deferred_weight_gradient_is_computed_once() -> None:
    """Forward, the input's gradients and the weights' gradients take the products of forward and a whole backward."""
    run = load_recipe(BASE[0], [*BASE[1:], "model=tiny_llama", "model.layers=2"])
    tokens = torch.arange(run.train.seq).unsqueeze(0)

    def products(*, apart: bool) -> tuple[int, list[Tensor]]:
        module = build_model(run, device=torch.device("cpu"), dtype=torch.float32, seed=1)
        kept: dict[int, Tensor] = {}
        gradients = WeightGradients(lambda weight, gradient: kept.__setitem__(id(weight), gradient))
        with FlopCounterMode(display=False) as counter:
            with defer_weight_gradients(gradients if apart else None):
                loss, _ = module(tokens, tokens)
            loss.backward()
            gradients.compute()
        for each in module.parameters():
            if each.grad is not None:
                kept.setdefault(id(each), each.grad)
        return counter.get_total_flops(), [kept[id(each)] for each in module.parameters()]

    (whole, expected), (apart, found) = products(apart=False), products(apart=True)
    assert apart == whole
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)


def test_the_engine_imports_no_deepspeed() -> None:
    code = "import sys, distrain.trainer.engines.native.engine; raise SystemExit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=DEADLINE).returncode == 0
