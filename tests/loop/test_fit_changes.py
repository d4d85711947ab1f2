"""A run that goes on with changed keys does what they say from the next step on: batch, length, optimizer, data."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain.trainer.loop.checkpoint import Checkpoint, newest

if TYPE_CHECKING:
    from distrain.tests.conftest import Job, Ranks

SAVED = 3
WORDS = (
    "quickstart", "model=tiny", "model.layers=2", "model.context=32", "data=synthetic", "cluster.gpus=1", "parallel.zero=0",
    "train.batch=8", "train.microbatch=4", "train.seq=16", "train.evaluate.every=0", "log.every=1", "optim.schedule=constant",
    "optim.warmup=0", "optim.lr=1e-3",
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run that saved after a few steps, by the words that it was given beside."""
    top = tmp_path_factory.mktemp("saved")

    @cache
    def of(*words: str) -> Path:
        return ranks.trained(top / f"run{of.cache_info().misses}", *WORDS, *words, f"train.steps={SAVED}").folder

    return of


def go_on(ranks: Ranks, source: Path, folder: Path, *words: str) -> Job:
    """The run whose checkpoints are in `source`, in a folder of its own, given further words."""
    shutil.copytree(source / "checkpoints", folder / "checkpoints")
    return ranks.fit(folder, *WORDS, *words)


def last(folder: Path) -> Checkpoint:
    found = newest(folder / "checkpoints").checkpoint
    assert found
    return found


def test_a_checkpoint_names_the_run_that_saved_it(saved: Callable[..., Path]) -> None:
    extra = last(saved()).extra
    assert (extra["samples"], extra["tokens"]) == (SAVED * 8, SAVED * 8 * 16)
    assert extra["run"]["model"]["hidden"] == 64
    assert extra["run"]["optim"]["lr"] == 1e-3


@pytest.mark.parametrize("batch", [4, 16])
def test_another_batch_takes_the_samples_that_come_next(ranks: Ranks, saved: Callable[..., Path], tmp_path: Path, batch: int) -> None:
    """The loss of a step is that of its samples before it: of as many as the checkpoint has its first loss of."""
    source = saved(f"train.microbatch={batch}", "train.batch=16") if batch == 16 else saved()
    before = last(source).extra
    job = go_on(ranks, source, tmp_path / "run", f"train.batch={batch}", f"train.microbatch={batch}", f"train.steps={SAVED + 1}")
    assert set(job.codes) == {0}, job.problems
    assert before["first"]["samples"] == [before["samples"], batch]
    assert job.figures("loss") == pytest.approx([before["first"]["loss"]], abs=1e-6)
    extra = last(tmp_path / "run").extra
    assert (extra["samples"], extra["tokens"]) == (before["samples"] + batch, before["tokens"] + 16 * batch)
    assert job.figures("tokens") == [extra["tokens"]]


def test_another_length_goes_on_after_as_many_tokens(ranks: Ranks, saved: Callable[..., Path], tmp_path: Path) -> None:
    job = go_on(ranks, saved(), tmp_path / "run", "train.seq=32", f"train.steps={SAVED + 1}")
    assert set(job.codes) == {0}, job.problems
    assert f"changed since step {SAVED}: train.seq 16 -> 32, train.steps {SAVED} -> {SAVED + 1}" in job.said
    extra = last(tmp_path / "run").extra
    assert (extra["samples"], extra["tokens"]) == (SAVED * 8 // 2 + 8, SAVED * 8 * 16 + 8 * 32)


def test_a_length_in_tokens_is_the_end_whatever_the_batch_was(ranks: Ranks, saved: Callable[..., Path], tmp_path: Path) -> None:
    tokens = SAVED * 8 * 16 + 4 * 16 * 5
    job = go_on(ranks, saved(), tmp_path / "run", "train.batch=4", "train.steps=null", f"train.tokens={tokens}")
    assert set(job.codes) == {0}, job.problems
    assert job.figures("tokens")[-1] == tokens
    assert last(tmp_path / "run").step == SAVED + 5


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_momentum_goes_on(ranks: Ranks, tmp_path: Path, zero: int) -> None:
    words = (*WORDS, "optim=sgd", "optim.momentum=0.9", "optim.lr=0.1", "optim.warmup=0", f"parallel.zero={zero}")
    whole = ranks.trained(tmp_path / "whole", *words, "train.steps=6").figures("loss")
    ranks.trained(tmp_path / "run", *words, "train.steps=3")
    assert ranks.trained(tmp_path / "run", *words, "train.steps=6").figures("loss") == whole


def test_another_optimizer_is_refused_unless_it_is_accepted(ranks: Ranks, saved: Callable[..., Path], tmp_path: Path) -> None:
    sgd = ("optim=sgd", "optim.momentum=0.9", "optim.lr=0.1", "optim.warmup=0", f"train.steps={SAVED + 1}")
    refused = go_on(ranks, saved(), tmp_path / "refused", *sgd)
    assert set(refused.codes) == {1}
    assert refused.problems[0].startswith("optim.name was adamw when step 3 was saved, and is sgd now: ")
    job = go_on(ranks, saved(), tmp_path / "run", *sgd, "checkpoint.accept=[optim.name]")
    assert set(job.codes) == {0}, job.problems
    assert "moments of the optimizer that begin at zero: momentum_buffer" in job.said
    assert "moments of the checkpoint that this optimizer has not: exp_avg, exp_avg_sq" in job.said
    assert {row.kind for row in last(tmp_path / "run").manifest.tensors} == {"weight", "momentum_buffer"}


def test_adam_that_follows_another_optimizer_counts_its_steps_from_the_first(
    ranks: Ranks, saved: Callable[..., Path], tmp_path: Path
) -> None:
    source = saved("optim=sgd", "optim.momentum=0.9", "optim.lr=0.1", "optim.warmup=0")
    job = go_on(ranks, source, tmp_path / "run", f"train.steps={SAVED + 2}", "checkpoint.accept=[optim.name]")
    assert set(job.codes) == {0}, job.problems
    assert last(tmp_path / "run").extra["engine"]["optimizer_steps"] == 2


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Path]:
    """A file in three folders: in the second it holds what it does in the first, in the third other text."""
    files = {name: tmp_path / name / "text.txt" for name in ("one", "same", "other")}
    for name, file in files.items():
        file.parent.mkdir()
        file.write_text(("what the other holds\n" if name == "other" else "as it was before\n") * 400)
    return files


def of_text(file: Path, tmp_path: Path) -> tuple[str, ...]:
    return "data=text", f"data.path={file}", f"data.cache={tmp_path / 'cache'}"


def test_the_same_text_in_another_place_goes_on(ranks: Ranks, texts: dict[str, Path], tmp_path: Path) -> None:
    source = ranks.trained(tmp_path / "source", *WORDS, *of_text(texts["one"], tmp_path), f"train.steps={SAVED}").folder
    job = go_on(ranks, source, tmp_path / "run", *of_text(texts["same"], tmp_path), f"train.steps={SAVED + 1}")
    assert set(job.codes) == {0}, job.problems
    assert not [line for line in job.said if "data" in line and "changed" in line]


def test_other_data_are_refused_by_their_key_and_begin_at_their_first_sample_where_accepted(
    ranks: Ranks, texts: dict[str, Path], tmp_path: Path
) -> None:
    source = ranks.trained(tmp_path / "source", *WORDS, *of_text(texts["one"], tmp_path), f"train.steps={SAVED}").folder
    words = (*of_text(texts["other"], tmp_path), f"train.steps={SAVED + 1}")
    refused = go_on(ranks, source, tmp_path / "refused", *words)
    assert set(refused.codes) == {1}
    assert refused.problems[0].startswith(f"data.path was {texts['one']} when step 3 was saved, and is {texts['other']} now: ")
    job = go_on(ranks, source, tmp_path / "run", *words, "checkpoint.accept=[data.path]")
    assert set(job.codes) == {0}, job.problems
    assert "the data are others: the run reads them from their first sample on" in job.said
    extra: dict[str, Any] = last(tmp_path / "run").extra
    assert (extra["samples"], extra["tokens"]) == (8, (SAVED + 1) * 8 * 16)


def test_a_file_that_was_written_to_is_refused(ranks: Ranks, texts: dict[str, Path], tmp_path: Path) -> None:
    source = ranks.trained(tmp_path / "source", *WORDS, *of_text(texts["one"], tmp_path), f"train.steps={SAVED}").folder
    texts["one"].write_text("as it was never before\n" * 400)
    refused = go_on(ranks, source, tmp_path / "run", *of_text(texts["one"], tmp_path), f"train.steps={SAVED + 1}")
    assert set(refused.codes) == {1}
    assert refused.problems[0].startswith(f"data.path={texts['one']} holds other tokens than when step 3 was saved: bring those back ")
