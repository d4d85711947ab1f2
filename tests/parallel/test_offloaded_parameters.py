"""Offloaded parameters of engine native: the same bits as without, and what is planned on the device, the host and the link."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")

from distrain.tests.fakes.rank_pool import choose_program  # noqa: E402
from distrain.tests.fakes.trained_runs import assert_same_bits, differing_messages, read_run  # noqa: E402
from distrain.tests.parallel.test_offloaded_rows import BASE, GPT, LLAMA, MOE  # noqa: E402
from distrain.trainer.plan.costs.offload import TO_DEVICE, TO_HOST  # noqa: E402
from distrain.trainer.plan.plan import make_plan  # noqa: E402

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

Words = tuple[str, ...]

OFFLOAD = "parallel.offload={optimizer: true, parameters: true}"

# fmt: off
LAYOUTS: dict[str, Words] = {
    "sums in bf16, two micro-batches":    (*LLAMA, "cluster.gpus=2", "train.precision=bf16"),
    "sums in float32":                    (*LLAMA, "cluster.gpus=2", "train.precision=bf16", "train.gradients=fp32"),
    "padded rows":                        (*GPT, "train.batch=6", "cluster.gpus=3", "train.precision=fp32"),
    "frozen rows":                        (*LLAMA, "cluster.gpus=2", "train.precision=bf16", "model.lora.rank=4"),
    "experts, an average":                (*MOE, "cluster.gpus=4", "parallel.ep=2", "train.precision=bf16", "optim.moments=bf16",
                                           "optim.ema=0.9", "train.evaluate={every: 3, batches: 1}"),
    "stages":                             (*GPT, "train.batch=4", "cluster.gpus=4", "parallel.pp=2", "parallel.gather=micro",
                                           "train.precision=bf16"),
    "context ranks":                      (*LLAMA, "cluster.gpus=2", "parallel.cp=2", "train.precision=bf16"),
    "sequence split":                     (*GPT, "train.batch=4", "cluster.gpus=4", "parallel.tp=2", "parallel.sequence=true",
                                           "train.precision=fp16"),
}
# fmt: on


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_with_weights_on_the_host_is_that_without_to_the_bit(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """In losses, norms, weights and moments. Messages and copies of each rank are as planned."""
    words = (*BASE, *LAYOUTS[name])
    plain = ranks.train(tmp_path / "plain", *words)
    choose_program(tmp_path / "host", "host rows")
    host = ranks.train(tmp_path / "host", *words, OFFLOAD)
    assert_same_bits(host, plain)
    assert not differing_messages(host.folder)
    plan = make_plan(read_run(host.folder))
    assert plan.memory
    found = [json.loads((host.folder / f"rows.{rank}").read_text()) for rank in range(plan.world)]
    for verb in (TO_HOST, TO_DEVICE):  # the test's ranks count no copies of gradients that other axes sum
        rows = [each.sent for each in plan.traffic if each.axis == "host" and each.verb == verb][: 2 - (verb == TO_HOST)]
        assert sum(rows) == pytest.approx(max(each[verb] for each in found), rel=1e-3)


HELD: tuple[Words, ...] = (
    (*LLAMA, "cluster.gpus=2", "train.precision=bf16"),
    (*LLAMA, "cluster.gpus=2", "train.precision=fp32"),
    (*LLAMA, "cluster.gpus=2", "train.precision=bf16", "model.lora.rank=4"),
)


@pytest.mark.parametrize("words", HELD)
def test_a_rank_holds_the_bytes_that_are_planned(ranks: RankPool, tmp_path: Path, words: Words) -> None:
    """No weights, gradients or states on the device; on the host rows, of float32 those that are stepped, sums of gradients and states."""
    job = ranks.train(tmp_path / "run", *BASE, *words, OFFLOAD)
    plan = make_plan(read_run(job.folder))
    assert plan.memory is not None
    assert plan.memory.host is not None
    (stage,) = plan.memory.stages
    held = json.loads((job.folder / "measured.json").read_text())["ranks"]
    most = {kind: max(rank[kind] for rank in held) for kind in held[0]}
    assert (most["weights"], most["gradients"], most["optimizer"]) == (stage.bytes.weights, 0, 0)
    assert most["activations"] == pytest.approx(stage.bytes.activations + stage.bytes.logits, rel=2e-3)
    assert most["host"] == pytest.approx(sum(vars(plan.memory.host.rank).values()), abs=1024)


def test_one_rank_alone_trains_with_its_weights_on_the_host(ranks: RankPool, tmp_path: Path) -> None:
    """As without offloading, where its gradients are as wide and of one micro-batch; it resumes on two ranks without."""
    words = (*BASE, *LLAMA, "cluster.gpus=1", "train.precision=bf16", "train.batch=1")
    plain = ranks.train(tmp_path / "plain", *words)
    host = ranks.train(tmp_path / "host", *words, OFFLOAD)
    assert_same_bits(host, plain)
