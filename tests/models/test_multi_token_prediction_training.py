"""Multi-token prediction trains in every layout as in one process, sends and holds the planned bytes, and resumes in another layout."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.one_process import ignored_labels, reference_curve, reference_further_losses, write_documents
from distrain.trainer.loop.reference_curves.compressed_gradients import compressed_gradients
from distrain.trainer.loop.reference_curves.delayed_gradients import delayed_gradients
from distrain.trainer.loop.reference_curves.local_steps import local_steps
from distrain.trainer.plan.compare_rank_messages import compare_rank_messages
from distrain.trainer.plan.mesh_position import mesh_position
from distrain.trainer.plan.plan import make_plan

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import PoolJob, RankPool


# fmt: off
BASE = (
    *("quickstart", "data=synthetic", "train.steps=2", "train.batch=8", "train.seq=32", "train.evaluate.every=0", "log.every=1"),
    *("optim.lr=1e-3", "optim.warmup=1", "train.clip=0.5", "log.ledger=true"),
)
MTP = "model.mtp={layers: 2, weight: 0.5}"
CURVES = {
    "llama":  ("model=tiny_llama", "model.layers=2", "model.kv_heads=2", "model.vocab=257", MTP),
    "gpt":    ("model=tiny", "model.layers=2", "model.tied=true", "model.dropout=0.1", MTP),
    "deep":   ("model=tiny_llama", "model.layers=4", MTP),
    "deep tied": ("model=tiny_llama", "model.layers=4", "model.tied=true", "model.mtp={layers: 1, weight: 0.5}"),
    "latent": ("model=tiny_mla", "model.layers=3", "model.dense_layers=1", "model.aux_loss=0.3", "model.mtp={layers: 1, weight: 0.5}",
               "model.router={score: sigmoid, scale: 2.5, bias: true, bias_rate: 0.003}"),
}
NATIVE = "engine=native"
LAYOUTS = (  # ranks, degrees, the rest
    ("llama",     1, "zero: 0",                                         ("train.microbatch=4",)),
    ("llama",     2, "zero: 1",                                         ("train.microbatch=2",)),
    ("llama",     2, "zero: 3",                                         ("train.microbatch=2",)),
    ("llama",     2, "zero: 2",                                         ("train.microbatch=2", NATIVE)),
    ("llama",     2, "zero: 3",                                         ("train.microbatch=2", NATIVE)),
    ("llama",     2, "tp: 2, sequence: true, recompute: full",          ("train.microbatch=4", "train.loss_chunks=3")),
    ("llama",     2, "cp: 2, zero: 1",                                  ("train.microbatch=4",)),
    ("llama",     4, "pp: 2, zero: 1",                                  ("train.microbatch=2",)),
    ("llama",     4, "pp: 2, zero: 3, gather: micro",                   ("train.microbatch=2", NATIVE)),
    ("llama",     4, "pp: 2, zero: 3, schedule: zb_h1",                 ("train.microbatch=1", NATIVE)),
    ("llama",     4, "pp: 2, zero: 2, schedule: zb_h1",                 ("train.microbatch=1", NATIVE)),
    ("gpt",       4, "pp: 2, zero: 2, schedule: zb_h1",                 ("train.microbatch=1", NATIVE)),
    ("gpt",       2, "tp: 2, recompute: selective",                     ("train.microbatch=4",)),
    ("deep",      2, "pp: 2, schedule: zb_v",                           ("train.microbatch=2", NATIVE)),
    ("deep tied", 2, "pp: 2, schedule: dualpipev",                      ("train.microbatch=2",)),
    ("latent",    4, "ep: 2, tp: 2, zero: 1",                           ("train.microbatch=2", NATIVE)),
    ("latent",    4, "ep: 2, pp: 2, zero: 1",                           ("train.microbatch=2",)),
    ("latent",    4, "cp: 2, ep: 2, zero: 3, recompute: full",          ("train.microbatch=2", NATIVE)),
)
# fmt: on
ROWS = pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: " ".join((row[0], row[2], *row[3])))

Row = tuple[str, int, str, tuple[str, ...]]


def words_of(row: Row) -> tuple[str, ...]:
    curve, ranks, degrees, others = row
    return (*BASE, *CURVES[curve], f"cluster.gpus={ranks}", f"parallel={{{degrees}}}", *others)


@pytest.fixture(scope="module")
def train_ranks(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("mtp")

    @cache
    def of(row: Row) -> PoolJob:
        return ranks.train(folder / f"row{LAYOUTS.index(row)}", *words_of(row))

    return of


@ROWS
def test_every_layout_trains_as_one_process_does(train_ranks: Any, row: Row) -> None:
    losses, norms = reference_curve((*BASE, *CURVES[row[0]]))
    job = train_ranks(row)
    assert job.figures("loss") == pytest.approx(losses, abs=3e-6, rel=0)
    assert job.figures("mtp_loss") == pytest.approx(reference_further_losses((*BASE, *CURVES[row[0]])), abs=3e-6, rel=0)
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=2e-5)


@ROWS
def test_ranks_send_the_planned_bytes(train_ranks: Any, row: Row) -> None:
    words = words_of(row)
    run = load_recipe(words[0], words[1:])
    if run.cluster.gpus == 1:
        return
    counted = json.loads((train_ranks(row).folder / "ledger.json").read_text())["ranks"]
    audits = [compare_rank_messages(run, rank, rows) for rank, rows in enumerate(counted)]
    assert [line for audit in audits for line in audit if line.verdict == "differs"] == []
    exchanged = [line for audit in audits for line in audit if line.axis == "ep"]
    assert sum(line.counted_bytes for line in exchanged) == sum(line.planned_bytes for line in exchanged)
    assert all(line.counted_count == line.planned_count for line in exchanged)


@ROWS
def test_ranks_hold_the_planned_bytes(train_ranks: Any, row: Row) -> None:
    """Activations are compared only where they do not depend on routing."""
    words = words_of(row)
    run = load_recipe(words[0], words[1:])
    memory = make_plan(run).memory
    assert memory is not None
    for rank, held in enumerate(json.loads((train_ranks(row).folder / "measured.json").read_text())["ranks"]):
        planned = memory.stages[mesh_position(run, rank).coordinates["pp"]].bytes
        if run.parallel.zero != 3:
            assert held["weights"] == planned.weights
        if run.parallel.ep == run.parallel.pp == 1 and run.parallel.recompute == "none":
            counts = 8 * run.train.microbatch if run.model.aux_loss and run.parallel.cp == 1 else 0  # labels of each sequence
            assert held["activations"] == planned.activations + planned.logits + counts


LONGER = (*BASE, *CURVES["latent"], "train.steps=4")
RESUMED = (*LONGER, "train.microbatch=2", "checkpoint.resume=auto")


@pytest.fixture(scope="module")
def stopped(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two stages that was stopped after two steps."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    ranks.fit(folder, *RESUMED, "cluster.gpus=4", "parallel={ep: 2, zero: 1, pp: 2}", signals=[(1, 0, 15)])
    return folder


@pytest.mark.parametrize("there", ["dp: 1", "ep: 2, tp: 2, zero: 1"])
def test_a_checkpoint_resumes_in_another_layout(ranks: RankPool, stopped: Path, tmp_path: Path, there: str) -> None:
    losses, norms = reference_curve(LONGER)
    shutil.copytree(stopped, tmp_path / "run")
    gpus = 1 if there == "dp: 1" else 4
    job = ranks.train(tmp_path / "run", *RESUMED, f"cluster.gpus={gpus}", f"parallel={{{there}}}")
    assert any(said.startswith("resumes from step") for said in job.lines)
    assert job.figures("loss") == pytest.approx(losses, abs=3e-6, rel=0)
    assert job.figures("mtp_loss") == pytest.approx(reference_further_losses(LONGER), abs=3e-6, rel=0)
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=2e-5)


@pytest.mark.parametrize(
    ("degrees", "simulated"),
    [
        ("zero: 0, staleness: 1", delayed_gradients),
        ("zero: 1, sync: {every: 2}", local_steps),
        ("zero: 0, compress: {name: powersgd, rank: 4}", compressed_gradients),
    ],
)
def test_late_local_and_compressed_steps_train_as_they_do_in_one_process(
    ranks: RankPool, tmp_path: Path, degrees: str, simulated: Any
) -> None:
    words = (*BASE, *CURVES["llama"], "train.steps=4", "optim.lr=1e-2", "train.microbatch=4", "cluster.gpus=2", NATIVE)
    job = ranks.train(tmp_path / "run", *words, f"parallel={{{degrees}}}")
    expected = simulated(str(job.folder))
    assert job.figures("loss") == pytest.approx(expected["losses"], abs=1e-5, rel=0)
    assert expected["weights"] < 1e-4
    assert len(job.figures("mtp_loss")) == 4


DOCUMENTS = (*("model=tiny_llama", "model.layers=2", "data=text", "data.documents=true", "model.vocab=256"), MTP)


def test_a_module_keeps_documents_apart_where_ranks_share_a_sequence(ranks: RankPool, tmp_path: Path) -> None:
    words = (*BASE, *DOCUMENTS, *write_documents(tmp_path))
    assert ignored_labels(words)
    losses, norms = reference_curve(words)
    job = ranks.train(tmp_path / "run", *words, "cluster.gpus=2", "parallel={cp: 2}", "train.microbatch=4")
    assert job.figures("loss") == pytest.approx(losses, abs=3e-6, rel=0)
    assert job.figures("mtp_loss") == pytest.approx(reference_further_losses(words), abs=3e-6, rel=0)
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=2e-5)


def test_a_run_may_begin_from_weights_without_modules(ranks: RankPool, tmp_path: Path, transformers: Any) -> None:
    """They begin from their drawn values, the same in every layout."""
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "published")
    words = (*BASE, f"model.hf={tmp_path / 'published'}", f"model.weights={tmp_path / 'published'}", MTP, "train.microbatch=2")
    jobs = [
        ranks.train(tmp_path / name, *words, f"cluster.gpus={gpus}", *degrees)
        for name, gpus, degrees in (("one", 1, ()), ("stages", 2, ("parallel.pp=2",)), ("zero", 2, ("parallel.zero=3", NATIVE)))
    ]
    for figure in ("loss", "mtp_loss"):
        first, *others = (job.figures(figure) for job in jobs)
        assert all(each == pytest.approx(first, abs=3e-6, rel=0) for each in others)
