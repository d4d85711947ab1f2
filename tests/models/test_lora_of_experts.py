"""LoRA of mixtures of experts and of latent attention: layouts train the curve of one process, send and hold what was planned."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.tests.fakes.one_process import reference_curve  # noqa: E402
from distrain.trainer.plan.compare_rank_messages import compare_rank_messages  # noqa: E402
from distrain.trainer.plan.mesh_position import mesh_position  # noqa: E402
from distrain.trainer.plan.plan import make_plan  # noqa: E402

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import PoolJob, RankPool

# fmt: off
BASE = (
    *("quickstart", "data=synthetic", "train.steps=3", "train.batch=8", "train.seq=32", "train.evaluate.every=0", "log.every=1"),
    *("optim.lr=1e-2", "optim.warmup=1", "train.clip=0.5", "log.ledger=true", "model.lora={rank: 4, alpha: 8}"),
)
CURVES = {
    "mixture": ("model=tiny_moe", "model.layers=4", "model.shared_experts=1", "model.dense_layers=1", "model.aux_loss=0.3"),
    "gpt-oss": ("model=tiny_gpt_oss", "model.layers=2", "model.lora.targets=[value,gate,down]"),
    "latent":  ("model=tiny_mla", "model.layers=4"),
    "latent keys": ("model=tiny_mla", "model.layers=2", "model.q_lora_rank=0", "model.lora.targets=[query,kv_a_proj_with_mqa,up]"),
    "attention": ("model=tiny_moe", "model.layers=2", "model.lora.targets=[query,value]"),
}
LAYOUTS = (  # ranks, degrees, the rest
    ("mixture", 8, "ep: 2, tp: 2, pp: 2, zero: 1",                    "train.microbatch=2"),
    ("mixture", 4, "tp: 2, pp: 2, sequence: true, schedule: zb_h1",   "train.microbatch=2"),
    ("mixture", 4, "tp: 2, pp: 2, schedule: zb_h1",   "train.microbatch=2"),
    ("mixture", 2, "zero: 3",                                         "train.microbatch=2"),
    ("mixture", 4, "ep: 2, cp: 2, zero: 3, recompute: full",          "train.microbatch=2"),
    ("gpt-oss", 4, "tp: 2, sequence: true, zero: 1",                  "train.microbatch=2"),
    ("gpt-oss", 2, "tp: 2",                  "train.microbatch=2"),
    ("latent",  4, "ep: 2, tp: 2, sequence: true",          "train.microbatch=2"),
    ("latent",  4, "ep: 2, tp: 2, zero: 2",          "train.microbatch=2"),
    ("latent",  2, "pp: 2, schedule: dualpipev",          "train.microbatch=2"),
    ("latent keys", 4, "cp: 2, tp: 2, sequence: true",                "train.microbatch=4"),
    ("latent keys", 4, "tp: 2, zero: 3, recompute: selective",        "train.microbatch=2"),
    ("attention", 4, "ep: 2, zero: 1",                                "train.microbatch=2"),
    ("attention", 4, "ep: 2, zero: 0, tp: 2",                                "train.microbatch=2"),
    ("attention", 4, "ep: 4, zero: 3",                                "train.microbatch=2"),
)
# fmt: on
ROWS = pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: f"{row[0]} {row[2]}")


def words_of(row: tuple[str, int, str, str]) -> tuple[str, ...]:
    curve, ranks, degrees, micro = row
    return (*BASE, *CURVES[curve], f"cluster.gpus={ranks}", f"parallel={{{degrees}}}", micro)


@pytest.fixture(scope="module")
def train_ranks(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("lora")

    @cache
    def of(row: tuple[str, int, str, str]) -> PoolJob:
        return ranks.train(folder / f"row{LAYOUTS.index(row)}", *words_of(row))

    return of


@ROWS
def test_a_layout_trains_the_curve_of_one_process(train_ranks: Any, row: tuple[str, int, str, str]) -> None:
    losses, norms = reference_curve((*BASE, *CURVES[row[0]]))
    job = train_ranks(row)
    assert job.figures("loss") == pytest.approx(losses, abs=3e-6, rel=0)
    assert len(set(losses)) == 3
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=1e-3)  # Adam enlarges the rounding of A's first gradients, which are 0


@ROWS
def test_its_ranks_send_and_hold_what_was_planned(train_ranks: Any, row: tuple[str, int, str, str]) -> None:
    words = words_of(row)
    run, folder = load_recipe(words[0], words[1:]), train_ranks(row).folder
    memory = make_plan(run).memory
    assert memory is not None
    sent = json.loads((folder / "ledger.json").read_text())["ranks"]
    assert [line for rank, rows in enumerate(sent) for line in compare_rank_messages(run, rank, rows) if line.verdict == "differs"] == []
    for rank, held in enumerate(json.loads((folder / "measured.json").read_text())["ranks"]):
        planned = memory.stages[mesh_position(run, rank).coordinates["pp"]].bytes
        for kind in ("weights", "gradients", "optimizer"):
            assert held[kind] == pytest.approx(getattr(planned, kind), rel=0.01), (rank, kind)
        if run.parallel.ep == run.parallel.pp == 1 and run.parallel.recompute == "none":
            counts = 8 * run.train.microbatch if run.model.aux_loss and run.parallel.cp == 1 else 0  # labels of each sequence
            assert held["activations"] == planned.activations + planned.logits + counts, rank
