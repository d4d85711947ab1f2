"""The same recipe trains the same curve in every layout, as one process without DeepSpeed does."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.one_process import ignored_labels, reference_curve, write_documents
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.prove.trials.covering import covering_rows

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

Words = tuple[str, ...]

STEPS = 3
# fmt: off
BASE = (
    "quickstart", "data=synthetic", f"train.steps={STEPS}", "optim.warmup=2", "optim.schedule=cosine", "train.batch=8", "train.seq=32",
    "train.evaluate.every=0", "log.every=1",
)
MODELS: tuple[Words, ...] = (
    ("model=tiny",       "model.layers=2", "model.tied=true"),
    ("model=tiny",       "model.layers=2", "model.tied=false", "model.vocab_multiple=96"),
    ("model=tiny_llama", "model.layers=2", "model.tied=false", "model.window=10"),
    ("model=tiny_llama", "model.layers=2", "model.tied=true", "train.attention=math", "model.window=10",
                         "model.layer_types=[sliding_attention,full_attention]"),
)
TEXTS: tuple[Words, ...] = (
    ("data=synthetic",),
    ("data=synthetic", "model.dropout=0.1"),
    ("data=text",      "data.end=10", "data.documents=true"),
    ("data=text",      "data.end=10", "data.documents=true", "model.dropout=0.2"),
)
OPTIMIZERS: tuple[Words, ...] = (
    ("optim=adamw", "optim.lr=1e-3", "optim.warmup=2"),
    ("optim=sgd",   "optim.lr=0.2",  "optim.warmup=2", "optim.momentum=0.9"),
)
CLIPS: tuple[Words, ...] = (("train.clip=0",), ("train.clip=0.5",))
# What a layout changes and the curve must not depend on.
RANKS:       tuple[Words, ...] = (("cluster.gpus=1",), ("cluster.gpus=2",), ("cluster.gpus=4",))
ZEROS:       tuple[Words, ...] = tuple((f"parallel.zero={stage}",) for stage in range(4))
MICROS:      tuple[Words, ...] = (("train.microbatch=2",), ("train.microbatch=1",))  # 1 to 8 micro-batches
RECOMPUTES:  tuple[Words, ...] = tuple((f"parallel.recompute={word}",) for word in ("none", "selective", "full"))
# fmt: on
CURVE = (MODELS, TEXTS, OPTIMIZERS, CLIPS)
LAYOUT = (RANKS, ZEROS, MICROS, RECOMPUTES)

Row = tuple[Words, ...]


def joined_words(row: Row) -> Words:
    return tuple(word for words in row for word in words)


def row_id(row: Row) -> str:
    return " ".join(word.rpartition(".")[2] for word in joined_words(row) if not word.startswith(("model.layer", "optim.", "data.end")))


ROWS = tuple(covering_rows(product(*CURVE, *LAYOUT)))  # every pair of choices of two factors occurs


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Words:
    """The overrides for a small text of short documents and its cache."""
    return write_documents(tmp_path_factory.mktemp("text"))


def curve_arguments(words: Words, text: Words) -> Words:
    """The arguments of a run except its layout."""
    return (*BASE, *words, *(text if "data=text" in words else ()))


def test_the_text_has_documents_that_begin_inside_sequences(text: Words) -> None:
    """Else the rows with data.documents=true would hold nothing."""
    run = curve_arguments((*MODELS[0], "data=text", "data.end=10", "data.documents=true"), text)
    assert ignored_labels(run) >= 4


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_a_layout_trains_the_curve_of_one_process_without_deepspeed(ranks: RankPool, tmp_path: Path, text: Words, row: Row) -> None:
    curve, layout = joined_words(row[: len(CURVE)]), joined_words(row[len(CURVE) :])
    job = ranks.train(tmp_path / "run", *curve_arguments(curve, text), *layout)
    losses, norms = reference_curve(curve_arguments(curve, text))
    assert job.figures("loss") == pytest.approx(losses, abs=5e-6, rel=0)  # 1e-6, two roundings of a loss of 5.5, except with SGD
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=2e-5)


# fmt: off
HALF_LAYOUTS = (
    ("cluster.gpus=1", "parallel.zero=0", "train.microbatch=8", "train.gradients=bf16", "model=tiny"),
    ("cluster.gpus=2", "parallel.zero=0", "train.microbatch=2", "train.gradients=fp32", "model=tiny_llama"),
    ("cluster.gpus=2", "parallel.zero=1", "train.microbatch=1", "train.gradients=bf16", "model=tiny_llama"),
    ("cluster.gpus=2", "parallel.zero=1", "train.microbatch=1", "train.gradients=fp32", "model=tiny_llama"),
    ("cluster.gpus=2", "parallel.zero=2", "train.microbatch=2", "train.gradients=bf16", "model=tiny"),
    ("cluster.gpus=4", "parallel.zero=2", "train.microbatch=2", "train.gradients=fp32", "model=tiny"),
    ("cluster.gpus=2", "parallel.zero=3", "train.microbatch=4", "train.gradients=bf16", "model=tiny_llama"),
    ("cluster.gpus=2", "parallel.zero=3", "train.microbatch=1", "train.gradients=fp32", "model=tiny"),
)
# fmt: on


@pytest.mark.parametrize("layout", HALF_LAYOUTS, ids=lambda words: " ".join(word.rpartition(".")[2] for word in words))
def test_bf16_trains_the_curve_of_float32_within_its_precision(ranks: RankPool, tmp_path: Path, layout: Words) -> None:
    """Looser than float32 because a weight has 8 bits: 2e-4 of a loss and 0.13 % of a norm were seen."""
    curve = (*BASE, layout[-1], "model.layers=2")
    job = ranks.train(tmp_path / "run", *curve, *layout[:-1], "train.precision=bf16")
    losses, norms = reference_curve(curve)
    assert job.figures("loss") == pytest.approx(losses, abs=5e-4, rel=0)
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=3e-3)


def test_validation_is_the_same_in_every_layout(ranks: RankPool, tmp_path: Path) -> None:
    words = (*BASE, "model=tiny", "model.layers=2", "model.dropout=0.1", "train.evaluate={every: 2, batches: 3}")
    layouts = [(1, 0, 8), (2, 3, 2)]
    one, *others = (
        ranks.train(tmp_path / f"dp{dp}", *words, f"cluster.gpus={dp}", f"parallel.zero={zero}", f"train.microbatch={micro}")
        for dp, zero, micro in layouts
    )
    native = (
        ("cluster.gpus=2", "parallel.zero=3", "train.microbatch=2"),
        ("cluster.gpus=2", "parallel.pp=2", "train.microbatch=2", "parallel.zero=0", "parallel.schedule=zb_h1"),
    )
    others += [ranks.train(tmp_path / f"native{at}", *words, *layout, "engine=native") for at, layout in enumerate(native)]
    assert [row["step"] for row in one.rows if "validation_loss" in row] == [2, 3]
    for other in others:
        assert other.figures("validation_loss") == pytest.approx(one.figures("validation_loss"), abs=2e-6, rel=0)
        assert other.figures("loss") == pytest.approx(one.figures("loss"), abs=2e-6, rel=0)


def test_offload_changes_no_curve(ranks: RankPool, tmp_path: Path) -> None:
    words = (*BASE, "model=tiny_llama", "model.layers=2", "cluster.gpus=2", "train.microbatch=2")
    losses, norms = reference_curve(words[:-2])
    for name, *offload in (
        ("optimizer2", "parallel.zero=2", "parallel.offload.optimizer=true"),
        ("optimizer3", "parallel.zero=3", "parallel.offload.optimizer=true"),
        ("both3",      "parallel.zero=3", "parallel.offload={optimizer: true, parameters: true}"),
        ("native1",    "parallel.zero=1", "parallel.offload.optimizer=true", "engine=native", "parallel.bucket=30_000"),
        ("native2",    "parallel.zero=2", "parallel.offload.optimizer=true", "engine=native", "train.microbatch=4"),
        ("native3",    "parallel.zero=3", "parallel.offload.optimizer=true", "engine=native"),
        ("nativeboth", "parallel.zero=3", "parallel.offload={optimizer: true, parameters: true}", "engine=native"),
        ("pipeline",   "parallel.zero=1", "parallel.offload.optimizer=true", "parallel.pp=2", "parallel.schedule=zb_h1"),
        ("sequence",   "parallel.zero=1", "parallel.offload.optimizer=true", "parallel.tp=2", "parallel.sequence=true"),
    ):  # fmt: skip
        job = ranks.train(tmp_path / name, *words, *offload)
        assert job.figures("loss") == pytest.approx(losses, abs=2e-6, rel=0), offload
        assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=2e-5), offload
        measured = json.loads((job.folder / "measured.json").read_text())["ranks"]
        held, gradients = ([each[kind] for each in measured] for kind in ("host", "gradients"))
        memory = make_plan(load_recipe(words[0], [*words[1:], *offload])).memory
        assert memory
        assert memory.host
        assert max(gradients) == pytest.approx(memory.stages[memory.stage].bytes.gradients, rel=5e-3), (offload, memory)
        assert sum(held) == pytest.approx(memory.host.node, rel=5e-3 if name != "native1" else 0.02), (offload, memory.host)
