"""Documents and examples under linear attention: layouts train what one process does, send what is planned and keep what is planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import pytest

pytest.importorskip("torch")

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.one_process import ignored_labels, reference_curve, write_documents
from distrain.trainer.plan.compare_rank_messages import compare_rank_messages
from distrain.trainer.plan.mesh_position import mesh_position
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.run import Run

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import PoolJob, RankPool

Words = tuple[str, ...]

# fmt: off
BASE = (
    "quickstart", "model=tiny_hybrid", "train.steps=2", "train.batch=4", "train.seq=32", "train.evaluate.every=0", "log.every=1",
    "optim.lr=1e-3", "optim.warmup=1", "train.clip=0.5", "log.ledger=true", "checkpoint.final=false",
)
APART    = ("data=text", "data.end=10", "data.documents=true")
CURVES: dict[str, Words] = {
    "documents":    (*APART, "model.aux_loss=0.3", "train.steps=3"),  # ZeRO 3 agrees in its second step on the order of gathers
    "long":         (*APART, "train.seq=160", "train.batch=2"),  # chunks of 64 tokens, the last of which is not full
    "masks":        (*APART, "train.attention=math", "model.dropout=0.1", "model.full_attention_interval=4"),
    "examples":     ("data=pairs",),
}
LAYOUTS = (  # curve, ranks, degrees, the rest
    ("documents", 1, "dp: 1",                                               "train.microbatch=2"),
    ("documents", 2, "cp: 2, zero: 1",                                      "train.microbatch=2"),
    ("documents", 4, "cp: 2, tp: 2, sequence: true, cp_comm: all_to_all",   "train.microbatch=2"),
    ("documents", 4, "cp: 2, pp: 2, zero: 1",                               "train.microbatch=2"),
    ("documents", 2, "zero: 3, recompute: full",                            "train.microbatch=2"),
    ("long",      1, "dp: 1",                                               "train.microbatch=2"),
    ("long",      4, "cp: 4, zero: 2",                                      "train.microbatch=2"),
    ("long",      2, "pp: 2, schedule: zb_h1",                              "train.microbatch=1"),
    ("long",      2, "cp: 2, zero: 3, recompute: full",                     "train.microbatch=1 engine=native"),
    ("masks",     4, "cp: 2, tp: 2, zero: 1",                               "train.microbatch=2"),
    ("examples",  1, "dp: 1",                                               "train.microbatch=4"),
    ("examples",  2, "cp: 2, zero: 2, cp_comm: all_to_all",                 "train.microbatch=2"),
    ("examples",  4, "tp: 2, pp: 2, sequence: true",                        "train.microbatch=2"),
    ("examples",  2, "ep: 2, zero: 1",                                      "train.microbatch=2"),
)
# fmt: on
ROWS = pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: f"{row[0]} {row[2]}")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Words]:
    """The words for short documents, and for pairs of a prompt and a completion, by data.name."""
    draw, folder = Random(7), tmp_path_factory.mktemp("data")
    rows = [["".join(draw.choices("etaoin ", k=draw.choice([2, 5, 9]))) for _ in range(2)] for _ in range(120)]
    (folder / "a.jsonl").write_text("".join(json.dumps(dict(zip(("prompt", "completion"), row, strict=True))) + "\n" for row in rows))
    return {"text": write_documents(folder), "pairs": (f"data.path={folder / 'a.jsonl'}", f"data.cache={folder / 'cache'}")}


class Trained(NamedTuple):
    """A row, trained once: the words of its curve, its run as planned, what its ranks left."""

    curve: Words
    run: Run
    job: PoolJob


@pytest.fixture(scope="module")
def train_ranks(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, data: dict[str, Words]
) -> Callable[[tuple[str, int, str, str]], Trained]:
    folder = tmp_path_factory.mktemp("hybrid")

    @cache
    def of(row: tuple[str, int, str, str]) -> Trained:
        name, many, degrees, rest = row
        curve = (*BASE, *CURVES[name], *data["pairs" if name == "examples" else "text"])
        every = (*curve, f"cluster.gpus={many}", f"parallel={{{degrees}}}", *rest.split())
        return Trained(curve, load_recipe(every[0], every[1:]), ranks.train(folder / f"row{LAYOUTS.index(row)}", *every))

    return of


def test_sequences_have_several_documents_and_examples(data: dict[str, Words]) -> None:
    """Else the rows would hold nothing."""
    assert ignored_labels((*BASE, *CURVES["documents"], *data["text"])) >= 4
    assert ignored_labels((*BASE, *CURVES["examples"], *data["pairs"])) >= 32


@ROWS
def test_layouts_train_what_one_process_does(train_ranks: Callable[..., Trained], row: tuple[str, int, str, str]) -> None:
    curve, _, job = train_ranks(row)
    losses, norms = reference_curve(curve)
    assert job.figures("loss") == pytest.approx(losses, abs=3e-6, rel=0)
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=2e-5)


@ROWS
def test_layouts_send_what_is_planned(train_ranks: Callable[..., Trained], row: tuple[str, int, str, str]) -> None:
    _, run, job = train_ranks(row)
    for rank, rows in enumerate(json.loads((job.folder / "ledger.json").read_text())["ranks"]):
        audit = compare_rank_messages(run, rank, rows)
        assert [line for line in audit if line.verdict == "differs" or (line.axis == "cp" and line.verdict != "equal")] == []
        assert any(line.axis == "cp" and line.verb == "all_to_all" for line in audit) == (run.parallel.cp > 1)


# Not to the byte: masks of documents; angles, which recomputed layers hold but autograd does not save; what expert ranks and
# zero-bubble schedules keep.
@pytest.mark.parametrize(
    "row", [row for row in LAYOUTS if row[0] != "masks" and not any(each in row[2] for each in ("full", "ep: 2", "zb_h1"))]
)
def test_layouts_keep_what_is_planned(train_ranks: Callable[..., Trained], row: tuple[str, int, str, str]) -> None:
    _, run, job = train_ranks(row)
    memory = make_plan(run).memory
    assert memory is not None
    for rank, held in enumerate(json.loads((job.folder / "measured.json").read_text())["ranks"]):
        kept = memory.stages[mesh_position(run, rank).coordinates["pp"]].bytes
        counts = 8 * run.train.microbatch if run.model.adds_router_loss and run.parallel.cp == 1 else 0  # labels of each sequence
        assert held["activations"] == kept.activations + kept.logits + counts
