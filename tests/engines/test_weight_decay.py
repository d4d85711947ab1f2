"""Weight decay leaves norms and biases alone, those of experts too, which have two dims: in every engine and optimizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.one_process import reference_curve
from distrain.trainer.plan.compare_rank_messages import compare_rank_messages
from distrain.trainer.plan.mesh_position import mesh_position
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.derived.weight_decay import is_decayed

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

BASE = (
    *("quickstart", "data=synthetic", "model=tiny_gpt_oss", "model.layers=2", "train.steps=3", "train.batch=4", "train.seq=16"),
    *(
        "train.evaluate.every=0",
        "log.every=1",
        "train.microbatch=1",
        "optim.lr=5e-3",
        "optim.warmup=0",
        "optim.weight_decay=30",
        "log.ledger=true",
    ),
)
# fmt: off
ROWS = {  # what the curve is of, how it is laid out
    "ZeRO 1, experts apart": ((),                     ("cluster.gpus=2", "parallel.ep=2", "parallel.zero=1")),
    "ZeRO 3":                ((),                     ("cluster.gpus=2", "parallel.zero=3", "engine=zero")),
    "pipe":                  ((),                     ("cluster.gpus=4", "parallel.pp=2", "parallel.ep=2")),
    "native":                ((),                     ("cluster.gpus=2", "parallel.ep=2", "parallel.zero=2", "engine=native")),
    "Muon":                  (("optim.name=muon",),   ("cluster.gpus=2", "parallel.ep=2", "parallel.zero=1")),
    "moments in bf16":       (("optim.moments=bf16", "engine=native"), ("cluster.gpus=2", "parallel.ep=2", "parallel.zero=1")),
    "muP":                   (("optim.mup=32", "engine=native"), ("cluster.gpus=2", "parallel.ep=2", "parallel.zero=1")),
}
# fmt: on


@pytest.mark.parametrize("row", ROWS)
def test_biases_of_experts_do_not_decay(ranks: RankPool, tmp_path: Path, row: str) -> None:
    """So large a decay that losses show whether it applies to biases: they differ by 6e-4 and
    more where it does. What does not decay is stepped apart, in messages and flat tensors that the plan knows."""
    words, layout = ROWS[row]
    losses, norms = reference_curve((*BASE, *words))
    job = ranks.train(tmp_path / "run", *BASE, *words, *layout)
    assert job.figures("loss") == pytest.approx(losses, abs=6e-6, rel=0)
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=5e-5)
    run = load_recipe(BASE[0], (*BASE[1:], *words, *layout))
    for rank, rows in enumerate(json.loads((job.folder / "ledger.json").read_text())["ranks"]):
        assert [line for line in compare_rank_messages(run, rank, rows) if line.verdict == "differs"] == []
    memory = make_plan(run).memory
    assert memory is not None
    for rank, held in enumerate(json.loads((job.folder / "measured.json").read_text())["ranks"]):
        planned = memory.stages[mesh_position(run, rank).coordinates["pp"]].bytes
        assert (held["weights"], held["gradients"]) == (planned.weights, planned.gradients)
        assert held["optimizer"] == pytest.approx(planned.optimizer, abs=300)  # beside it, the number of steps of each tensor


def test_matrices_and_tables_decay_and_biases_of_any_shape_do_not() -> None:
    assert is_decayed("embedding.weight", 2)
    assert is_decayed("layers.0.experts.up.weight", 3)
    assert not any(is_decayed(name, dims) for name, dims in (("norm.weight", 1), ("mlp.up.bias", 1), ("layers.0.experts.up.bias", 2)))
    assert not is_decayed("model.layers.0.mlp.experts.gate_up_proj_bias", 2)  # transformers' gpt-oss, as family hf
