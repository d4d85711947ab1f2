"""An offloaded optimizer at ZeRO 3 of engine native: the same bits as without, and what is planned on the device, the host and the link."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")

from distrain.tests.fakes.rank_pool import choose_program  # noqa: E402
from distrain.tests.fakes.trained_runs import assert_same_bits, differing_messages, read_run  # noqa: E402
from distrain.trainer.plan.costs.offload import TO_DEVICE, TO_HOST  # noqa: E402
from distrain.trainer.plan.plan import make_plan  # noqa: E402

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

Words = tuple[str, ...]

BASE = (
    *("quickstart", "data=synthetic", "train.steps=3", "train.seq=16", "train.evaluate.every=0", "log.every=1", "log.ledger=true"),
    *("optim.lr=3e-3", "optim.warmup=1", "train.clip=0.5", "train.microbatch=1", "parallel.zero=3", "engine=native"),
)
GPT = ("model=tiny", "model.layers=2", "model.tied=true", "model.dropout=0.1")
LLAMA = ("model=tiny_llama", "model.layers=2", "train.batch=4")
MOE = ("model=tiny_moe", "model.layers=2", "train.batch=4")
OFFLOAD = "parallel.offload.optimizer=true"

# fmt: off
LAYOUTS: dict[str, Words] = {
    "sums in float32, two micro-batches": (*LLAMA, "cluster.gpus=2", "train.precision=bf16", "train.gradients=fp32"),
    "padded rows":                        (*GPT, "train.batch=6", "cluster.gpus=3", "train.precision=fp32"),
    "gathered once, gradients apart":     (*LLAMA, "cluster.gpus=4", "parallel.pp=2", "parallel.schedule=zb_h1", "train.precision=bf16"),
    "experts, two owners of each row":    (*MOE, "cluster.gpus=4", "parallel.ep=2", "parallel.shard=2", "train.precision=bf16",
                                           "optim.moments=bf16"),
    "sequence split, an average":         (*GPT, "train.batch=4", "cluster.gpus=4", "parallel.tp=2", "parallel.sequence=true",
                                           "train.precision=fp16", "optim.ema=0.9", "train.evaluate={every: 3, batches: 1}"),
}
# fmt: on


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_that_the_host_steps_are_those_that_the_device_steps(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """To the bit, in losses, norms, weights and moments. Each rank copies in a step what is planned, in pieces that hold parts of several
    weights; its messages are as planned."""
    words = (*BASE, *LAYOUTS[name])
    plain = ranks.train(tmp_path / "plain", *words)
    choose_program(tmp_path / "host", "pieces")
    host = ranks.train(tmp_path / "host", *words, OFFLOAD)
    assert_same_bits(host, plain)
    assert not differing_messages(host.folder)
    plan = make_plan(read_run(host.folder))
    assert plan.memory
    found = [json.loads((host.folder / f"pieces.{rank}").read_text()) for rank in range(plan.world)]
    assert all(each["pieces"] > 1 and each["mixed"] for each in found)
    ranks_of_stage = plan.world // len(plan.memory.stages)
    for verb in (TO_HOST, TO_DEVICE):
        (row,) = (each for each in plan.traffic if each.axis == "host" and each.verb == verb)
        copied = [sum(each[verb] for each in found[at : at + ranks_of_stage]) for at in range(0, plan.world, ranks_of_stage)]
        assert row.sent == pytest.approx(max(copied) / ranks_of_stage, rel=1e-3)


HELD: tuple[Words, ...] = (
    (*LLAMA, "cluster.gpus=2", "train.precision=bf16"),
    (*GPT, "train.batch=4", "cluster.gpus=4", "parallel.pp=2", "train.precision=bf16", "train.gradients=fp32"),
    (*LLAMA, "cluster.gpus=2", "train.precision=bf16", "model.lora.rank=4"),
)


@pytest.mark.parametrize("words", HELD)
def test_a_rank_holds_the_bytes_that_are_planned(ranks: RankPool, tmp_path: Path, words: Words) -> None:
    """Of each stage, up to the padding of rows: narrow weights and float32 gradients on the device, the rest on the host."""
    job = ranks.train(tmp_path / "run", *BASE, *words, OFFLOAD)
    plan = make_plan(read_run(job.folder))
    assert plan.memory is not None
    assert plan.memory.host is not None
    held = json.loads((job.folder / "measured.json").read_text())["ranks"]
    each = len(held) // len(plan.memory.stages)
    for at, stage in enumerate(plan.memory.stages):
        most = {kind: max(rank[kind] for rank in held[at * each : (at + 1) * each]) for kind in held[0]}
        assert most["weights"] == pytest.approx(stage.bytes.weights, abs=64)
        assert most["gradients"] == pytest.approx(stage.bytes.gradients, abs=64)
        assert (most["optimizer"], stage.bytes.optimizer) == (0, 0)
        assert most["activations"] == pytest.approx(stage.bytes.activations + stage.bytes.logits, rel=2e-3)
    assert max(rank["host"] for rank in held) == pytest.approx(sum(vars(plan.memory.host.rank).values()), abs=1024)
    assert sum(rank["host"] for rank in held) == pytest.approx(plan.memory.host.node, rel=0.02)
