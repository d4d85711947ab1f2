"""A tensor rank with padded heads keeps their core's values beside those without them: what is planned is what the fullest rank keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

from distrain.cli.config.load import load_recipe
from distrain.trainer.plan.plan import make_plan

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

BASE = (
    *("quickstart", "data=synthetic", "train.steps=2", "train.batch=4", "train.microbatch=4", "train.seq=32", "optim.warmup=1"),
    *("train.evaluate.every=0", "log.every=1", "model.layers=2"),
)
ODD = ("model=tiny", "model.heads=3", "model.hidden=66", "model.head_dim=22", "parallel.tp=2")
# fmt: off
ROWS = {  # what is set, whether ranks keep different bytes
    "heads":          ((*ODD, "cluster.gpus=2"), True),
    "shared keys":    (("model=tiny_llama", "model.heads=6", "model.kv_heads=2", "model.head_dim=16", "cluster.gpus=4",
                        "parallel.tp=4"), True),
    "context ranks":  ((*ODD, "cluster.gpus=4", "parallel.cp=2"), True),
    "core again":     ((*ODD, "cluster.gpus=2", "parallel.recompute=selective"), False),
    "frozen out":     ((*ODD, "cluster.gpus=2", "model.lora.rank=4", "model.lora.targets=[query]"), False),
    "latent":         (("model=tiny_mla", "model.heads=3", "cluster.gpus=2", "parallel.tp=2"), False),
}
# fmt: on


@pytest.mark.parametrize("row", ROWS)
def test_the_fullest_tensor_rank_keeps_what_is_planned(ranks: RankPool, tmp_path: Path, row: str) -> None:
    words, differ = ROWS[row]
    memory = make_plan(load_recipe(BASE[0], (*BASE[1:], *words))).memory
    assert memory is not None
    planned = memory.stages[0].bytes
    measured = json.loads((ranks.train(tmp_path / "run", *BASE, *words).folder / "measured.json").read_text())["ranks"]
    held = [each["activations"] for each in measured]
    assert max(held) == planned.activations + planned.logits
    assert (min(held) < max(held)) is differ
