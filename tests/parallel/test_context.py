"""Context parallelism: ranks that split every sequence compute what one rank computes, in every layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

pytest.importorskip("torch")

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.one_process import ignored_labels, reference_curve, write_documents
from distrain.trainer.plan.compare_rank_messages import compare_rank_messages
from distrain.trainer.plan.mesh_position import mesh_position
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.run import Run

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import PoolJob, RankPool

Words = tuple[str, ...]

STEPS, SAVED, RESUMED = 2, 2, 3
# fmt: off
BASE = (
    "quickstart", "data=synthetic", f"train.steps={STEPS}", "train.batch=4", "train.seq=32", "train.evaluate.every=0", "log.every=1",
    "optim.lr=1e-3", "optim.warmup=1", "train.clip=0.5",
)
GPT    = ("model=tiny",       "model.layers=2", "model.tied=true")
LLAMA  = ("model=tiny_llama", "model.layers=2", "model.tied=false",
          "model.rope={type: dynamic, factor: 4, original_max_position_embeddings: 16}")  # scaled by the length of the whole sequence
DROPS  = ("model.dropout=0.2",)
MATH   = ("train.attention=math",)
LATER  = ("train.steps=3",)  # DeepSpeed's ZeRO 3 agrees in its second step on the order of gathers, and the last one is held to the plan
WINDOW = ("model.window=10", "model.layer_types=[sliding_attention,full_attention]")
SINKS  = ("model.sinks=true",)
APART  = ("data=text", "data.end=10", "data.documents=true")
# What is learnt, and how it is laid out: context ranks alone, beside tensor ranks, beside data ranks, under each stage of ZeRO.
ROWS: tuple[tuple[Words, str], ...] = (
    (GPT,                   "cp: 2, zero: 0"),
    (LLAMA + DROPS + LATER, "cp: 2, dp: 2, zero: 3, recompute: selective"),
    (LLAMA + MATH,          "cp: 2, dp: 2, zero: 1, recompute: selective"),
    (GPT + MATH + DROPS,    "cp: 4, zero: 0"),
    (LLAMA + APART + DROPS, "cp: 4, zero: 2, recompute: full"),
    (LLAMA + APART + MATH,  "cp: 2, tp: 2, zero: 1"),
    (LLAMA,                 "cp: 2, dp: 2, zero: 0, cp_comm: all_to_all"),
    (LLAMA + APART + DROPS + LATER, "cp: 2, dp: 2, zero: 3, recompute: selective, cp_comm: all_to_all"),
    (LLAMA + APART,         "cp: 2, tp: 2, zero: 1, cp_comm: all_to_all"),
    (LLAMA + WINDOW + SINKS, "cp: 4, zero: 2, recompute: full, cp_comm: all_to_all"),
    (LLAMA + APART,         "cp: 2, dp: 2, zero: 1, recompute: selective"),
    (GPT + DROPS,           "cp: 2, tp: 2, zero: 1, sequence: true"),
    ((*LLAMA, "train.batch=2"), "cp: 2, tp: 4, zero: 0, sequence: true"),
    (LLAMA + WINDOW,        "cp: 2, dp: 2, zero: 1"),
    (LLAMA + WINDOW + MATH + DROPS, "cp: 2, tp: 2, zero: 0, recompute: selective"),
    (LLAMA + APART + WINDOW, "cp: 4, zero: 2, recompute: full"),
    (GPT + DROPS,           "cp: 2, pp: 2, zero: 0, cp_comm: all_to_all"),
    (LLAMA + APART + DROPS, "cp: 2, pp: 2, zero: 0, schedule: gpipe"),
)
# fmt: on


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Words:
    """The words for a small text of short documents, and for its cache."""
    return write_documents(tmp_path_factory.mktemp("text"))


def laid_out(degrees: str) -> Words:
    """The words of a layout on as many ranks as it has."""
    found = dict(each.split(": ") for each in degrees.split(", "))
    gpus = 1
    for axis in ("cp", "tp", "dp", "pp"):
        gpus *= int(found.get(axis, 1))
    return (f"cluster.gpus={gpus}", *(f"parallel.{key}={value}" for key, value in found.items()))


class Trained(NamedTuple):
    """A row, trained once: its words, its run as planned, what its ranks left."""

    words: Words
    run: Run
    job: PoolJob


@pytest.fixture(scope="module")
def train_ranks(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, text: Words) -> Callable[[Words, str], Trained]:
    folder = tmp_path_factory.mktemp("context")

    @cache
    def of(words: Words, layout: str) -> Trained:
        curve = (*BASE, *words, *(text if "data=text" in words else ()))
        every = (*curve, *laid_out(layout), "train.microbatch=2", "log.ledger=true", "checkpoint.final=false")
        return Trained(curve, load_recipe(every[0], every[1:]), ranks.train(folder / f"row{len(list(folder.iterdir()))}", *every))

    return of


def name_of(row: tuple[Words, str]) -> str:
    words, layout = row
    return f"{' '.join(words[:1] + words[3:])} {layout}"


def row_test(rows: Sequence[tuple[Words, str]]) -> Any:
    return pytest.mark.parametrize("row", rows, ids=name_of)


def test_the_text_has_documents_that_begin_inside_sequences(text: Words) -> None:
    """Else the rows with data.documents=true would hold nothing."""
    assert ignored_labels((*BASE, *GPT, *APART, *text)) >= 4


@row_test(ROWS)
def test_context_ranks_train_what_one_process_does(train_ranks: Callable[[Words, str], Trained], row: tuple[Words, str]) -> None:
    words, _, job = train_ranks(*row)
    losses, norms = reference_curve(words)
    assert job.figures("loss") == pytest.approx(losses, abs=2e-6, rel=0)
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=2e-5)


@row_test(ROWS)
def test_context_ranks_send_what_is_planned(train_ranks: Callable[[Words, str], Trained], row: tuple[Words, str]) -> None:
    _, run, job = train_ranks(*row)
    counted = json.loads((job.folder / "ledger.json").read_text())["ranks"]
    for rank, rows in enumerate(counted):
        audit = compare_rank_messages(run, rank, rows)
        exchanged = run.parallel.cp_comm == "all_to_all"
        assert {line.verb for line in audit if line.axis == "cp"} == ({"all_to_all"} if exchanged else {"all_gather", "reduce_scatter"})
        assert [line for line in audit if line.verdict == "differs" or (line.axis == "cp" and line.verdict != "equal")] == []


# Not to the byte: angles, which recomputed layers hold but autograd does not save.
@row_test([row for row in ROWS if "full" not in row[1]])
def test_context_ranks_keep_what_is_planned(train_ranks: Callable[[Words, str], Trained], row: tuple[Words, str]) -> None:
    _, run, job = train_ranks(*row)
    counted = json.loads((job.folder / "measured.json").read_text())["ranks"]
    memory = make_plan(run).memory
    assert memory is not None
    for rank, held in enumerate(counted):
        kept = memory.stages[mesh_position(run, rank).coordinates["pp"]].bytes
        assert held["activations"] == kept.activations + kept.logits


def test_validation_is_the_same_for_context_ranks(ranks: RankPool, tmp_path: Path) -> None:
    words = (*BASE, *LLAMA, *DROPS, "train.evaluate={every: 1, batches: 2}", "train.microbatch=2", "checkpoint.final=false")
    layouts = ("dp: 1", "cp: 2, zero: 1", "cp: 2, pp: 2")
    one, *others = (ranks.train(tmp_path / f"at{at}", *words, *laid_out(layout)) for at, layout in enumerate(layouts))
    assert len(one.figures("validation_loss")) == 2
    for other in others:
        assert other.figures("validation_loss") == pytest.approx(one.figures("validation_loss"), abs=2e-6, rel=0)


CHANGES = (
    ("cp: 2, zero: 1",          "dp: 2, zero: 1"),
    ("dp: 2, zero: 0",          "cp: 2, tp: 2, zero: 2, sequence: true"),
    ("cp: 2, dp: 2, zero: 3",   "cp: 2, pp: 2, zero: 1"),
)  # fmt: skip


@pytest.mark.parametrize(("one", "other"), CHANGES)
def test_context_ranks_go_on_from_what_others_saved(ranks: RankPool, tmp_path: Path, one: str, other: str) -> None:
    curve = (*BASE, *GPT, *DROPS, "optim.schedule=constant", f"train.steps={RESUMED}")
    losses, norms = reference_curve(curve)
    ranks.train(tmp_path / "run", *curve, "train.microbatch=2", *laid_out(one), f"train.steps={SAVED}")
    job = ranks.train(tmp_path / "run", *curve, "train.microbatch=1", *laid_out(other))
    assert f"resumes from step {SAVED}" in job.lines
    assert job.figures("loss") == pytest.approx(losses, abs=2e-6, rel=0)
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=2e-5)


def test_attention_and_models_are_the_same_in_float64() -> None:
    """Every core, with and without documents, grouped heads, dropout, recomputation; and whole models, with all their gradients. On three
    ranks: two and four train in the rows above."""
    script = Path(__file__).parents[1] / "rank_programs" / "context_ranks.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, str(script), "3"], capture_output=True, text=True, timeout=DEADLINE, env=environment)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert len(found) == 91
    assert {what: far for what, far in found.items() if not far < 1e-12} == {}
