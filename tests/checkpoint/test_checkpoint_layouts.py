"""A run that was saved under one layout goes on under any other as if nothing had stopped it, and takes nothing else for its own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain.trainer.loop.checkpoint import Checkpoint, Reader, Shard, newest, opened, save, whole

if TYPE_CHECKING:
    from torch import Tensor

    from distrain.tests.conftest import Job, Ranks

SAVED, STEPS = 3, 5
# Six query heads on two of keys and values, 90 of ffn, 250 words: four tensor ranks hold padding of each, and share the keys.
# fmt: off
MODEL = (
    "quickstart", "model=tiny", "model.layers=4", "model.hidden=48", "model.heads=6", "model.kv_heads=2", "model.head_dim=8",
    "model.ffn=90", "model.vocab=250", "model.dropout=0.1", "data=synthetic", "train.batch=8", "train.seq=16", "train.evaluate.every=0",
    "log.every=1", "optim.schedule=constant", "optim.warmup=2", "optim.lr=3e-3",
)
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp1":           ("cluster.gpus=1", "parallel.zero=0", "train.microbatch=2"),
    "dp2":           ("cluster.gpus=2", "parallel.zero=0", "train.microbatch=1"),
    "dp2 zero1":     ("cluster.gpus=2", "parallel.zero=1", "train.microbatch=2"),
    "dp4 zero3":     ("cluster.gpus=4", "parallel.zero=3", "train.microbatch=2"),
    "tp2":           ("cluster.gpus=2", "parallel.zero=0", "train.microbatch=4", "parallel.tp=2"),
    "tp2 sequence":  ("cluster.gpus=2", "parallel.zero=1", "train.microbatch=2", "parallel.tp=2", "parallel.sequence=true"),
    "tp4 padded":    ("cluster.gpus=4", "parallel.zero=0", "train.microbatch=8", "parallel.tp=4", "model.vocab_multiple=16"),
    "dp2 tp2 zero2": ("cluster.gpus=4", "parallel.zero=2", "train.microbatch=2", "parallel.tp=2"),
    "pp2 zero1":     ("cluster.gpus=2", "parallel.zero=1", "train.microbatch=1", "parallel.pp=2"),
    "pp4":           ("cluster.gpus=4", "parallel.zero=0", "train.microbatch=2", "parallel.pp=4"),
    "pp2 dualpipev": ("cluster.gpus=2", "parallel.zero=1", "train.microbatch=1", "parallel.pp=2", "parallel.schedule=dualpipev"),
    "dp2 cp2":       ("cluster.gpus=4", "parallel.zero=0", "train.microbatch=2", "parallel.cp=2"),
    "dp2 tp2 pp2":   ("cluster.gpus=8", "parallel.zero=1", "train.microbatch=2", "parallel.pp=2", "parallel.tp=2"),
}
# fmt: on
NAMES = tuple(LAYOUTS)
ALL = os.environ.get("DISTRAIN_TEST_LAYOUTS") == "all"  # every layout from every one
# After two more steps: Adam makes steps of the rounding noise that is all there is of a key bias's gradient (1.1e-5 was seen), and
# moments follow what that moves (1.3e-7 of 1.7e-2, and 2.8e-9 of 2.8e-4).
APART = {"weight": 3e-5, "exp_avg": 5e-7, "exp_avg_sq": 1e-8}
FURTHER = (4, 9)  # along the table: each layout saves for two others, and loads from two others
SOME = tuple((one, NAMES[(at + far) % len(NAMES)]) for at, one in enumerate(NAMES) for far in FURTHER)
PAIRS = tuple(product(NAMES, NAMES)) if ALL else SOME


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run under a layout that saved after so many steps."""
    folder = tmp_path_factory.mktemp("saved")

    @cache
    def of(name: str, steps: int = SAVED) -> Path:
        return ranks.trained(folder / f"{name.replace(' ', '-')}-{steps}", *MODEL, *LAYOUTS[name], f"train.steps={steps}").folder

    return of


def gone_on(ranks: Ranks, source: Path, folder: Path, *words: str, steps: int = STEPS) -> Job:
    """The run whose checkpoints are in `source`, trained further in a folder of its own."""
    shutil.copytree(source / "checkpoints", folder / "checkpoints")
    return ranks.fit(folder, *MODEL, *words, f"train.steps={steps}")


def held(folder: Path) -> tuple[Checkpoint, dict[tuple[str, str], Tensor]]:
    """A run's newest checkpoint, and all that it holds by name and kind."""
    found = newest(folder / "checkpoints").checkpoint
    assert found
    reader = Reader(found)
    return found, {(row.name, row.kind): reader.read(whole(row.name, row.kind, row.shape)) for row in found.manifest.tensors}


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda name: name)
def test_what_one_layout_saved_another_goes_on_from(ranks: Ranks, saved: Callable[..., Path], tmp_path: Path, one: str, other: str) -> None:
    job = gone_on(ranks, saved(one), tmp_path / "run", *LAYOUTS[other])
    assert set(job.codes) == {0}, job.problems
    assert f"goes on from step {SAVED}" in job.said
    plain = saved("dp1", STEPS)
    losses = [row["loss"] for row in rows(plain)][SAVED:]
    assert job.figures("loss") == pytest.approx(losses, abs=2e-6, rel=0)
    (_, mine), (_, theirs) = held(tmp_path / "run"), held(plain)
    assert mine.keys() == theirs.keys()
    apart = {key: float((tensor - theirs[key]).abs().max()) for key, tensor in mine.items()}
    assert not {key: most for key, most in apart.items() if most > APART[key[1]]}


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- the loss that goes with a checkpoint


def test_the_loss_that_is_saved_is_the_next_steps(ranks: Ranks, tmp_path: Path) -> None:
    words = (*MODEL, "model.dropout=0", "cluster.gpus=2", "train.microbatch=4", "checkpoint.every=2", "checkpoint.keep=9")
    job = ranks.trained(tmp_path / "run", *words, "train.steps=4")
    said = newest_but(tmp_path / "run", 2).extra["first"]
    assert said == {"samples": [16, 8], "loss": pytest.approx(job.figures("loss")[2], abs=1e-6), "precision": "fp32"}


def newest_but(folder: Path, step: int) -> Checkpoint:
    return opened(folder / "checkpoints" / f"step_{step}")


def rewritten(source: Path, folder: Path, change: Callable[[dict[tuple[str, str], Tensor]], None], **extra: Any) -> Path:
    """A run's folder with another's newest checkpoint after a change: whole, verified, and not what was saved."""
    found, tensors = held(source)
    change(tensors)
    shards = [Shard(slice=whole(name, kind, tuple(tensor.shape)), tensor=tensor) for (name, kind), tensor in tensors.items()]
    save(folder / "checkpoints", found.step, shards, extra=found.extra | extra, keep=1)
    return folder


def rolled(tensors: dict[tuple[str, str], Tensor]) -> None:
    """Every row of the embedding where the one before it should be."""
    tensors["embedding.weight", "weight"] = tensors["embedding.weight", "weight"].roll(1, 0)


@pytest.mark.parametrize("name", ["dp1", "tp2", "dp4 zero3", "pp2 zero1"])
def test_what_loads_as_something_else_ends_the_run(ranks: Ranks, saved: Callable[..., Path], tmp_path: Path, name: str) -> None:
    """The saver's round was two sequences: of four replicas that load it, three have nothing to say."""
    source = rewritten(saved("dp1"), tmp_path / "source", rolled)
    job = gone_on(ranks, source, tmp_path / "run", *LAYOUTS[name])
    assert set(job.codes) == {1}
    (problem,) = job.problems
    loss = held(source)[0].extra["first"]["loss"]
    assert problem.startswith(f"step 3 was saved with a loss of {loss:.4f} on its next 2 sequences, and loads with 5.")
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "no step was taken"


def test_a_loss_in_half_precision_is_close_enough(ranks: Ranks, saved: Callable[..., Path], tmp_path: Path) -> None:
    job = gone_on(ranks, saved("tp2"), tmp_path / "run", *LAYOUTS["dp2 zero1"], "train.precision=bf16")
    assert set(job.codes) == {0}, job.problems


def test_another_text_is_refused_or_accepted_and_its_loss_is_not_compared(ranks: Ranks, saved: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh" * 500)
    other = ("data=text", f"data.path={tmp_path / 'a.txt'}", f"data.cache={tmp_path / 'cache'}")
    refused = gone_on(ranks, saved("dp1"), tmp_path / "refused", *LAYOUTS["tp2"], *other)
    assert set(refused.codes) == {1}
    assert refused.problems[0].startswith("data.name was synthetic when step 3 was saved, and is text now: ")
    accepted = ("checkpoint.accept=[data.name,data.path]",)
    job = gone_on(ranks, saved("dp1"), tmp_path / "run", *LAYOUTS["tp2"], *other, *accepted)
    assert set(job.codes) == {0}, job.problems
    assert "the data are others: the run reads them from their first sample on" in job.said
    again = ranks.trained(tmp_path / "run", *MODEL, *LAYOUTS["dp1"], *other, f"train.steps={STEPS + 1}")
    assert not [line for line in again.said if line.startswith("the data are")]


@pytest.mark.parametrize(("word", "change"), [("train.seed=7", "train.seed 1234 -> 7"), ("train.seq=12", "train.seq 16 -> 12")])
def test_a_change_of_order_is_said(ranks: Ranks, saved: Callable[..., Path], tmp_path: Path, word: str, change: str) -> None:
    job = gone_on(ranks, saved("dp1"), tmp_path / "run", *LAYOUTS["dp2"], "model.context=16", word)
    assert set(job.codes) == {0}, job.problems
    assert change in job.said[0]
    assert job.said[0].startswith("changed since step 3: ")


def test_a_run_that_has_diverged_is_saved_without_a_loss(ranks: Ranks, tmp_path: Path) -> None:
    ranks.trained(tmp_path / "run", *MODEL, *LAYOUTS["dp1"], "optim.lr=1e30", "optim.warmup=0", "train.steps=2")
    assert "first" not in held(tmp_path / "run")[0].extra


# --- the form of what is stored


def test_a_checkpoint_is_without_padding(saved: Callable[..., Path]) -> None:
    (_, plain), (found, padded) = held(saved("dp1")), held(saved("tp4 padded"))
    assert padded["embedding.weight", "weight"].shape == (250, 48)
    assert {key: each.shape for key, each in padded.items()} == {key: each.shape for key, each in plain.items()}
    rows = {row.name: row for row in found.manifest.tensors if row.kind == "weight"}
    assert [part.size for part in rows["embedding.weight"].slices] == [(64, 48), (64, 48), (64, 48), (58, 48)]
    assert {row.file for part in rows.values() for row in part.slices} == {f"weight.{rank}.0.safetensors" for rank in range(4)}


def test_what_is_not_the_run_s_model_is_refused_on_every_stage(ranks: Ranks, saved: Callable[..., Path], tmp_path: Path) -> None:
    job = gone_on(ranks, saved("dp1"), tmp_path / "run", *LAYOUTS["pp2 zero1"], "model.layers=3")
    assert set(job.codes) == {1}
    (problem,) = job.problems
    assert problem.startswith("model.layers was 4 when step 3 was saved, and is 3 now: ")
