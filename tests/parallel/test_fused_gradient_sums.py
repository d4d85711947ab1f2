"""Engine native takes a compiled layer's gradients together: the same bits as where autograd adds each, in every layout, in fewer calls.
It joins the weights that share an input where they lie side by side.

Ranks of these tests do so with layers that are not compiled (rank_programs/together_ranks.py): a compiled layer may round otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.rank_pool import choose_program
from distrain.trainer.engines.native.prepare_layers import layers_taken_together
from distrain.trainer.models.build import build_model

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import PoolJob, RankPool

BASE = (
    *("quickstart", "data=synthetic", "train.steps=3", "train.seq=16", "train.evaluate.every=0", "log.every=1", "optim.warmup=0"),
    *("optim.lr=1e-3", "checkpoint.final=false", "train.clip=0.5", "train.microbatch=1", "train.precision=fp32", "engine=native"),
)
LAYERS, MICROS = 4, 4
LLAMA = ("model=tiny_llama", f"model.layers={LAYERS}", f"train.batch={MICROS}")
TIED = ("model=tiny", f"model.layers={LAYERS}", f"train.batch={MICROS}", "model.tied=true", "model.dropout=0.1")
ONE, TWO, FOUR = (f"cluster.gpus={ranks}" for ranks in (1, 2, 4))
LAYOUTS = {
    "one rank": (*LLAMA, ONE, "parallel.zero=0"),
    "a tied model": (*TIED, ONE, "parallel.zero=1"),
    "gradients wider than weights": (*LLAMA, ONE, "parallel.zero=1", "train.precision=bf16", "train.gradients=fp32"),
    "recomputation": (*LLAMA, ONE, "parallel.zero=0", "parallel.recompute=full"),
    "further tokens": (*LLAMA, ONE, "parallel.zero=0", "model.mtp={layers: 2, weight: 0.3}"),
    "lora": (*LLAMA, ONE, "parallel.zero=0", "model.lora={rank: 4, alpha: 8}"),
    "data, one message a bucket": (*LLAMA, TWO, "parallel.dp=2", "parallel.zero=0", "parallel.bucket=20000"),
    "data, one after backward": (*LLAMA, TWO, "parallel.dp=2", "parallel.zero=1", "parallel.overlap.data=false"),
    "data, at every micro-batch": (*LLAMA, TWO, "parallel.dp=2", "parallel.zero=2", "parallel.bucket=20000"),
    "data, sums used late": (*LLAMA, TWO, "parallel.dp=2", "parallel.zero=0", "parallel.staleness=1"),
    "tensor, sequence": (*LLAMA, TWO, "parallel.tp=2", "parallel.sequence=true", "parallel.zero=1"),
    "stages": (*TIED, TWO, "parallel.pp=2", "parallel.zero=0"),
    "chunks of stages": (*LLAMA, TWO, "parallel.pp=2", "parallel.zero=0", "parallel.schedule=interleaved", "parallel.chunks=2"),
    "products apart": (*LLAMA, FOUR, "parallel.pp=2", "parallel.dp=2", "parallel.zero=1", "parallel.schedule=zb_h1"),
    "no flush": (*LLAMA, TWO, "parallel.pp=2", "parallel.zero=0", "parallel.schedule=pipedream"),
}


def train_together(ranks: RankPool, folder: Path, *words: str) -> PoolJob:
    choose_program(folder, "together")
    return ranks.train(folder, *BASE, *words)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layers_gradients_are_the_same_bits_together(layout: str, ranks: RankPool, tmp_path: Path) -> None:
    apart = ranks.train(tmp_path / "apart", *BASE, *LAYOUTS[layout])
    together = train_together(ranks, tmp_path / "together", *LAYOUTS[layout])
    for key in ("loss", "grad_norm"):
        assert together.figures(key) == apart.figures(key)
    assert len(set(together.figures("loss"))) == 3


@pytest.mark.parametrize("layout", ["one rank", "gradients wider than weights", "recomputation", "data, one message a bucket"])
def test_a_layer_stores_its_first_gradients_and_adds_the_others_in_one_call_each(layout: str, ranks: RankPool, tmp_path: Path) -> None:
    train_together(ranks, tmp_path / "run", *LAYOUTS[layout])
    micros = MICROS // (2 if "data" in layout else 1)
    assert json.loads((tmp_path / "run" / "together.0").read_text()) == {"stored": LAYERS, "added": LAYERS * (micros - 1)}


FEED_FORWARDS = [f"layers.{layer}.mlp" for layer in range(LAYERS)]


@pytest.mark.parametrize(
    ("layout", "joined"),
    [
        (LAYOUTS["one rank"], FEED_FORWARDS),  # of two key heads for four query heads
        (("model.kv_heads=4", *LAYOUTS["one rank"]), [f"layers.{at}.{part}" for at in range(LAYERS) for part in ("attention", "mlp")]),
        (LAYOUTS["a tied model"], [f"layers.{at}.attention" for at in range(LAYERS)]),
        ((*LLAMA, TWO, "parallel.dp=2", "parallel.zero=2"), FEED_FORWARDS),
        (LAYOUTS["lora"], []),
        (LAYOUTS["tensor, sequence"], []),
        (LAYOUTS["products apart"], []),
        (LAYOUTS["no flush"], []),
        ((*LAYOUTS["one rank"], "parallel.bucket=1"), []),  # each weight has a memory of its own
    ],
)
def test_weights_are_joined_where_one_rank_has_them_side_by_side(
    layout: tuple[str, ...], joined: list[str], ranks: RankPool, tmp_path: Path
) -> None:
    train_together(ranks, tmp_path / "run", *layout)
    assert json.loads((tmp_path / "run" / "joined").read_text()) == joined


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        (("train.compile=true",), LAYERS),
        (("train.compile=true", "model.mtp={layers: 2, weight: 0.3}"), LAYERS + 2),
        (("train.compile=false",), 0),
        (("train.compile=true", "parallel.zero=3"), 0),
        (("train.compile=true", "model=tiny_moe"), 0),
    ],
)
def test_compiled_layers_without_experts_are_taken_together(words: tuple[str, ...], layers: int) -> None:
    import torch

    run = load_recipe(BASE[0], [*BASE[1:], *LLAMA, ONE, *words])
    module = build_model(run, device=torch.device("cpu"), dtype=torch.float32, seed=1)
    assert len(layers_taken_together(run, [module])) == layers
