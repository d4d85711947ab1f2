"""Offloaded parameters of engine native: the same bits as without, and what is planned on the device, the host and the link."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")

from distrain.tests.fakes.rank_pool import choose_program  # noqa: E402
from distrain.tests.fakes.trained_runs import differing_messages  # noqa: E402
from distrain.tests.parallel.test_offloaded_rows import BASE, GPT, LLAMA, MOE, saved_tensors  # noqa: E402

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
    for key in ("loss", "grad_norm", "validation_loss", "validation_ema_loss"):
        assert host.figures(key) == plain.figures(key)
    mine, theirs = saved_tensors(host.folder), saved_tensors(plain.folder)
    assert mine.keys() == theirs.keys()
    assert not [key for key, tensor in mine.items() if tensor.dtype != theirs[key].dtype or not torch.equal(tensor, theirs[key])]
    assert not differing_messages(host.folder)
