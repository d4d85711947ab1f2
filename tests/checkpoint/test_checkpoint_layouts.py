"""A run that was saved under one layout goes on under any other as if nothing had stopped it, and takes nothing else for its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.trainer.loop.checkpoint import (
    CheckpointReader,
    SavedCheckpoint,
    Shard,
    find_newest,
    open_checkpoint,
    save_shards,
    whole_slice,
)
from distrain.trainer.loop.state.resume_loss_check import mismatch_reason
from distrain.trainer.rundir.metric_rows import read_step_rows

if TYPE_CHECKING:
    from torch import Tensor

    from distrain.tests.fakes.rank_pool import PoolJob, RankPool

SAVED, STEPS = 2, 3
# Six query heads on two key-value heads, ffn=90, vocab=250: four tensor-parallel ranks pad each of them and share key-value heads.
# fmt: off
MODEL = (
    "quickstart", "model=tiny", "model.layers=4", "model.hidden=48", "model.heads=6", "model.kv_heads=2", "model.head_dim=8",
    "model.ffn=90", "model.vocab=250", "model.dropout=0.1", "data=synthetic", "train.batch=8", "train.seq=16", "train.evaluate.every=0",
    "log.every=1", "optim.schedule=constant", "optim.warmup=1", "optim.lr=3e-3",
)
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp1":           ("cluster.gpus=1", "parallel.zero=0", "train.microbatch=2"),
    "dp2 zero1":     ("cluster.gpus=2", "parallel.zero=1", "train.microbatch=2"),
    "dp4 zero3":     ("cluster.gpus=4", "parallel.zero=3", "train.microbatch=2"),
    "tp2":           ("cluster.gpus=2", "parallel.zero=0", "train.microbatch=4", "parallel.tp=2"),
    "tp2 sequence":  ("cluster.gpus=2", "parallel.zero=1", "train.microbatch=4", "parallel.tp=2", "parallel.sequence=true"),
    "tp4 padded":    ("cluster.gpus=4", "parallel.zero=0", "train.microbatch=8", "parallel.tp=4", "model.vocab_multiple=16"),
    "dp2 tp2 zero2": ("cluster.gpus=4", "parallel.zero=2", "train.microbatch=2", "parallel.tp=2"),
    "pp2 zero1":     ("cluster.gpus=2", "parallel.zero=1", "train.microbatch=2", "parallel.pp=2"),
    "pp4":           ("cluster.gpus=4", "parallel.zero=0", "train.microbatch=4", "parallel.pp=4"),
    "pp2 dualpipev": ("cluster.gpus=2", "parallel.zero=1", "train.microbatch=2", "parallel.pp=2", "parallel.schedule=dualpipev"),
    "dp2 cp2":       ("cluster.gpus=4", "parallel.zero=0", "train.microbatch=2", "parallel.cp=2"),
    "native dp2 zero2":   ("cluster.gpus=2", "parallel.zero=2", "train.microbatch=2", "engine=native"),
    "native dp2 pp2 zero3": ("cluster.gpus=4", "parallel.zero=3", "train.microbatch=2", "parallel.pp=2", "engine=native"),
    "native dp4 shard2":  ("cluster.gpus=4", "parallel.zero=1", "parallel.shard=2", "train.microbatch=2", "engine=native",
                           "parallel.offload.optimizer=true"),
    "native zero3 shard2": ("cluster.gpus=4", "parallel.zero=3", "parallel.shard=2", "train.microbatch=2", "engine=native",
                            "parallel.offload.optimizer=true"),
    "native zero3 host":   ("cluster.gpus=2", "parallel.zero=3", "train.microbatch=2", "engine=native",
                            "parallel.offload={optimizer: true, parameters: true}"),
    "native tp2 pp2 zbv": ("cluster.gpus=4", "parallel.zero=0", "train.microbatch=2", "parallel.pp=2", "parallel.tp=2",
                           "parallel.schedule=zb_v", "engine=native"),
    "native interleaved": ("cluster.gpus=4", "parallel.zero=1", "train.microbatch=2", "parallel.pp=2", "parallel.dp=2",
                           "parallel.schedule=interleaved", "parallel.chunks=2", "engine=native"),
}
# fmt: on
NAMES = tuple(LAYOUTS)
ALL = os.environ.get("DISTRAIN_TEST_LAYOUTS") == "all"  # every layout from every one
# After one or two more steps: Adam makes steps of the rounding noise that is all there is of a key bias's gradient (1.1e-5 was seen after
# two), and moments follow what that moves (1.3e-7 of 1.7e-2, and 2.8e-9 of 2.8e-4).
APART = {"weight": 3e-5, "exp_avg": 5e-7, "exp_avg_sq": 1e-8}
FURTHER = 4  # rows further down the table: each layout saves for one other and loads from one other, for a checkpoint knows no layout
SOME = tuple((one, NAMES[(at + FURTHER) % len(NAMES)]) for at, one in enumerate(NAMES))
PAIRS = tuple(product(NAMES, NAMES)) if ALL else SOME


@pytest.fixture(scope="module")
def saved_run(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run that saved after so many steps, by its layout."""
    folder = tmp_path_factory.mktemp("saved")

    @cache
    def folder_of(name: str, steps: int = SAVED) -> Path:
        return ranks.train(folder / f"{name.replace(' ', '-')}-{steps}", *MODEL, *LAYOUTS[name], f"train.steps={steps}").folder

    return folder_of


def resume_from(ranks: RankPool, source: Path, folder: Path, *overrides: str, steps: int = STEPS) -> PoolJob:
    """Resume from the checkpoints in `source`, in another folder."""
    shutil.copytree(source / "checkpoints", folder / "checkpoints")
    return ranks.fit(folder, *MODEL, *overrides, f"train.steps={steps}")


def newest_tensors(folder: Path) -> tuple[SavedCheckpoint, dict[tuple[str, str], Tensor]]:
    """A run's newest checkpoint, and its tensors by name and kind."""
    found = find_newest(folder / "checkpoints").checkpoint
    assert found
    reader = CheckpointReader(found)
    return found, {(row.name, row.kind): reader.read(whole_slice(row.name, row.kind, row.shape)) for row in found.manifest.tensors}


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda name: name)
def test_a_run_resumes_in_any_layout_from_a_checkpoint_of_any_other(
    ranks: RankPool, saved_run: Callable[..., Path], tmp_path: Path, one: str, other: str
) -> None:
    job = resume_from(ranks, saved_run(one), tmp_path / "run", *LAYOUTS[other])
    assert set(job.codes) == {0}, job.problems
    assert f"resumes from step {SAVED}" in job.lines
    plain = saved_run("dp1", STEPS)
    losses = [row["loss"] for row in read_step_rows(plain)][SAVED:]
    assert job.figures("loss") == pytest.approx(losses, abs=2e-6, rel=0)
    (_, mine), (_, theirs) = newest_tensors(tmp_path / "run"), newest_tensors(plain)
    assert mine.keys() == theirs.keys()
    errors = {key: float((tensor - theirs[key]).abs().max()) for key, tensor in mine.items()}
    assert not {key: most for key, most in errors.items() if most > APART[key[1]]}


# --- the resume check


def test_the_recorded_loss_is_that_of_the_next_step(ranks: RankPool, tmp_path: Path) -> None:
    overrides = (*MODEL, "model.dropout=0", "cluster.gpus=2", "train.microbatch=4", "checkpoint.every=2", "checkpoint.keep=9")
    job = ranks.train(tmp_path / "run", *overrides, "train.steps=4")
    recorded = checkpoint_at(tmp_path / "run", 2).extra["first"]
    assert recorded == {"samples": [16, 8], "loss": pytest.approx(job.figures("loss")[2], abs=1e-6), "precision": "fp32"}


def checkpoint_at(folder: Path, step: int) -> SavedCheckpoint:
    return open_checkpoint(folder / "checkpoints" / f"step_{step}")


def write_changed(source: Path, folder: Path, change: Callable[[dict[tuple[str, str], Tensor]], None], **extra: Any) -> Path:
    """Write another run's newest checkpoint with a change: it is complete and verifies. Return the folder."""
    found, tensors = newest_tensors(source)
    change(tensors)
    shards = [Shard(slice=whole_slice(name, kind, tuple(tensor.shape)), tensor=tensor) for (name, kind), tensor in tensors.items()]
    save_shards(folder / "checkpoints", found.step, shards, extra=found.extra | extra, keep=1)
    return folder


def shift_rows(tensors: dict[tuple[str, str], Tensor]) -> None:
    """Shift every row of the embedding by one."""
    tensors["embedding.weight", "weight"] = tensors["embedding.weight", "weight"].roll(1, 0)


@pytest.mark.parametrize("name", ["tp2", "dp4 zero3", "pp2 zero1"])
def test_a_checkpoint_that_loads_with_another_loss_ends_the_run(
    ranks: RankPool, saved_run: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    """The saver's round had two sequences: of the four replicas that load it, three evaluate none."""
    source = write_changed(saved_run("dp1"), tmp_path / "source", shift_rows)
    job = resume_from(ranks, source, tmp_path / "run", *LAYOUTS[name])
    assert set(job.codes) == {1}
    (problem,) = job.problems
    loss = newest_tensors(source)[0].extra["first"]["loss"]
    assert problem.startswith(f"step {SAVED} was saved with a loss of {loss:.4f} on its next 2 sequences, and loads with 5.")
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "no step was taken"


def test_a_run_of_lora_that_loads_with_another_loss_is_told_of_its_frozen_weights() -> None:
    tuned, drawn = load_recipe("finetune_llama", ["model.weights=/base"]), load_recipe("quickstart")
    assert mismatch_reason(tuned) == "the frozen weights in /base may not be those that it was trained with: put these back"
    for run in (drawn, load_recipe("finetune_llama", ["model.weights=/base", "model.lora.rank=0"])):
        assert mismatch_reason(run).startswith("the model is computed in another way now, or this is a bug")


def test_the_resume_check_tolerates_half_precision(ranks: RankPool, saved_run: Callable[..., Path], tmp_path: Path) -> None:
    job = resume_from(ranks, saved_run("tp2"), tmp_path / "run", *LAYOUTS["dp2 zero1"], "train.precision=bf16")
    assert set(job.codes) == {0}, job.problems


def test_another_text_is_refused_or_if_accepted_its_loss_is_not_compared(
    ranks: RankPool, saved_run: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh" * 500)
    other = ("data=text", f"data.path={tmp_path / 'a.txt'}", f"data.cache={tmp_path / 'cache'}")
    refused = resume_from(ranks, saved_run("dp1"), tmp_path / "refused", *LAYOUTS["tp2"], *other)
    assert set(refused.codes) == {1}
    assert refused.problems[0].startswith(f"data.name was synthetic when step {SAVED} was saved, and is text now: ")
    accepted = ("checkpoint.accept=[data.name,data.path]",)
    job = resume_from(ranks, saved_run("dp1"), tmp_path / "run", *LAYOUTS["tp2"], *other, *accepted)
    assert set(job.codes) == {0}, job.problems
    assert "the data are different: the run reads them from their first sample on" in job.lines
    again = ranks.train(tmp_path / "run", *MODEL, *LAYOUTS["dp1"], *other, f"train.steps={STEPS + 1}")
    assert not [line for line in again.lines if line.startswith("the data are")]


@pytest.mark.parametrize(("override", "change"), [("train.seed=7", "train.seed 1234 -> 7"), ("train.seq=12", "train.seq 16 -> 12")])
def test_a_changed_data_order_is_reported(
    ranks: RankPool, saved_run: Callable[..., Path], tmp_path: Path, override: str, change: str
) -> None:
    job = resume_from(ranks, saved_run("dp1"), tmp_path / "run", *LAYOUTS["dp2 zero1"], "model.context=16", override)
    assert set(job.codes) == {0}, job.problems
    assert change in job.lines[0]
    assert job.lines[0].startswith(f"changed since step {SAVED}: ")


def test_a_diverged_run_is_saved_without_a_loss(ranks: RankPool, tmp_path: Path) -> None:
    ranks.train(tmp_path / "run", *MODEL, *LAYOUTS["dp1"], "optim.lr=1e30", "optim.warmup=0", "train.steps=2")
    assert "first" not in newest_tensors(tmp_path / "run")[0].extra


# --- the stored tensors


def test_a_checkpoint_has_no_padding(saved_run: Callable[..., Path]) -> None:
    (_, plain), (found, padded) = newest_tensors(saved_run("dp1")), newest_tensors(saved_run("tp4 padded"))
    assert padded["embedding.weight", "weight"].shape == (250, 48)
    assert {key: each.shape for key, each in padded.items()} == {key: each.shape for key, each in plain.items()}
    rows = {row.name: row for row in found.manifest.tensors if row.kind == "weight"}
    assert [part.size for part in rows["embedding.weight"].slices] == [(64, 48), (64, 48), (64, 48), (58, 48)]
    assert {row.file for part in rows.values() for row in part.slices} == {f"weight.{rank}.0.safetensors" for rank in range(4)}


def test_a_checkpoint_of_another_model_is_refused_at_every_zero_stage(
    ranks: RankPool, saved_run: Callable[..., Path], tmp_path: Path
) -> None:
    job = resume_from(ranks, saved_run("dp1"), tmp_path / "run", *LAYOUTS["pp2 zero1"], "model.layers=3")
    assert set(job.codes) == {1}
    (problem,) = job.problems
    assert problem.startswith(f"model.layers was 4 when step {SAVED} was saved, and is 3 now: ")
