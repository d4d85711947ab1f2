"""A run that resumes with changed keys follows them from the next step on: batch, length, optimizer, data."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain.trainer.loop.checkpoint import SavedCheckpoint, find_newest

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import PoolJob, RankPool

SAVED = 3
OVERRIDES = (
    "quickstart", "model=tiny", "model.layers=2", "model.context=32", "data=synthetic", "cluster.gpus=1", "parallel.zero=0",
    "train.batch=8", "train.microbatch=4", "train.seq=16", "train.evaluate.every=0", "log.every=1", "optim.schedule=constant",
    "optim.warmup=0", "optim.lr=1e-3",
)  # fmt: skip


@pytest.fixture(scope="module")
def saved_run(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run that saved after a few steps, by its further overrides."""
    top = tmp_path_factory.mktemp("saved")

    @cache
    def folder_of(*overrides: str) -> Path:
        return ranks.train(top / f"run{folder_of.cache_info().misses}", *OVERRIDES, *overrides, f"train.steps={SAVED}").folder

    return folder_of


def resume_from(ranks: RankPool, source: Path, folder: Path, *overrides: str) -> PoolJob:
    """Resume from the checkpoints in `source`, in another folder and with further overrides."""
    shutil.copytree(source / "checkpoints", folder / "checkpoints")
    return ranks.fit(folder, *OVERRIDES, *overrides)


def newest_checkpoint(folder: Path) -> SavedCheckpoint:
    found = find_newest(folder / "checkpoints").checkpoint
    assert found
    return found


def test_a_checkpoint_records_the_run_that_saved_it(saved_run: Callable[..., Path]) -> None:
    extra = newest_checkpoint(saved_run()).extra
    assert (extra["samples"], extra["tokens"]) == (SAVED * 8, SAVED * 8 * 16)
    assert extra["run"]["model"]["hidden"] == 64
    assert extra["run"]["optim"]["lr"] == 1e-3


@pytest.mark.parametrize("batch", [4, 16])
def test_a_changed_batch_continues_with_the_next_samples(
    ranks: RankPool, saved_run: Callable[..., Path], tmp_path: Path, batch: int
) -> None:
    """The loss of the step is the one that the checkpoint recorded for the same number of samples."""
    source = saved_run(f"train.microbatch={batch}", "train.batch=16") if batch == 16 else saved_run()
    before = newest_checkpoint(source).extra
    job = resume_from(ranks, source, tmp_path / "run", f"train.batch={batch}", f"train.microbatch={batch}", f"train.steps={SAVED + 1}")
    assert set(job.codes) == {0}, job.problems
    assert before["first"]["samples"] == [before["samples"], batch]
    assert job.figures("loss") == pytest.approx([before["first"]["loss"]], abs=1e-6)
    extra = newest_checkpoint(tmp_path / "run").extra
    assert (extra["samples"], extra["tokens"]) == (before["samples"] + batch, before["tokens"] + 16 * batch)
    assert job.figures("tokens") == [extra["tokens"]]


def test_a_changed_sequence_length_continues_after_the_same_number_of_tokens(
    ranks: RankPool, saved_run: Callable[..., Path], tmp_path: Path
) -> None:
    job = resume_from(ranks, saved_run(), tmp_path / "run", "train.seq=32", f"train.steps={SAVED + 1}")
    assert set(job.codes) == {0}, job.problems
    assert f"changed since step {SAVED}: train.seq 16 -> 32, train.steps {SAVED} -> {SAVED + 1}" in job.lines
    extra = newest_checkpoint(tmp_path / "run").extra
    assert (extra["samples"], extra["tokens"]) == (SAVED * 8 // 2 + 8, SAVED * 8 * 16 + 8 * 32)


def test_train_tokens_ends_the_run_whatever_the_batch_was(ranks: RankPool, saved_run: Callable[..., Path], tmp_path: Path) -> None:
    tokens = SAVED * 8 * 16 + 4 * 16 * 5
    job = resume_from(ranks, saved_run(), tmp_path / "run", "train.batch=4", "train.steps=null", f"train.tokens={tokens}")
    assert set(job.codes) == {0}, job.problems
    assert job.figures("tokens")[-1] == tokens
    assert newest_checkpoint(tmp_path / "run").step == SAVED + 5


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_momentum_is_restored(ranks: RankPool, tmp_path: Path, zero: int) -> None:
    overrides = (*OVERRIDES, "optim=sgd", "optim.momentum=0.9", "optim.lr=0.1", "optim.warmup=0", f"parallel.zero={zero}")
    whole = ranks.train(tmp_path / "whole", *overrides, "train.steps=6").figures("loss")
    ranks.train(tmp_path / "run", *overrides, "train.steps=3")
    assert ranks.train(tmp_path / "run", *overrides, "train.steps=6").figures("loss") == whole


def test_another_optimizer_is_refused_unless_accepted(ranks: RankPool, saved_run: Callable[..., Path], tmp_path: Path) -> None:
    sgd = ("optim=sgd", "optim.momentum=0.9", "optim.lr=0.1", "optim.warmup=0", f"train.steps={SAVED + 1}")
    refused = resume_from(ranks, saved_run(), tmp_path / "refused", *sgd)
    assert set(refused.codes) == {1}
    assert refused.problems[0].startswith("optim.name was adamw when step 3 was saved, and is sgd now: ")
    job = resume_from(ranks, saved_run(), tmp_path / "run", *sgd, "checkpoint.accept=[optim.name]")
    assert set(job.codes) == {0}, job.problems
    assert "optimizer moments that start at zero: momentum_buffer" in job.lines
    assert "moments in the checkpoint that this optimizer does not use: exp_avg, exp_avg_sq" in job.lines
    assert {row.kind for row in newest_checkpoint(tmp_path / "run").manifest.tensors} == {"weight", "momentum_buffer"}


def test_adam_after_another_optimizer_starts_its_step_count_at_zero(
    ranks: RankPool, saved_run: Callable[..., Path], tmp_path: Path
) -> None:
    source = saved_run("optim=sgd", "optim.momentum=0.9", "optim.lr=0.1", "optim.warmup=0")
    job = resume_from(ranks, source, tmp_path / "run", f"train.steps={SAVED + 2}", "checkpoint.accept=[optim.name]")
    assert set(job.codes) == {0}, job.problems
    assert newest_checkpoint(tmp_path / "run").extra["engine"]["optimizer_steps"] == 2


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Path]:
    """A file in three folders: the first two have the same text, the third another."""
    files = {name: tmp_path / name / "text.txt" for name in ("one", "same", "other")}
    for name, file in files.items():
        file.parent.mkdir()
        file.write_text(("what the other holds\n" if name == "other" else "as it was before\n") * 400)
    return files


def of_text(file: Path, tmp_path: Path) -> tuple[str, ...]:
    return "data=text", f"data.path={file}", f"data.cache={tmp_path / 'cache'}"


def test_the_same_text_at_another_path_is_the_same_data(ranks: RankPool, texts: dict[str, Path], tmp_path: Path) -> None:
    source = ranks.train(tmp_path / "source", *OVERRIDES, *of_text(texts["one"], tmp_path), f"train.steps={SAVED}").folder
    job = resume_from(ranks, source, tmp_path / "run", *of_text(texts["same"], tmp_path), f"train.steps={SAVED + 1}")
    assert set(job.codes) == {0}, job.problems
    assert not [line for line in job.lines if "data" in line and "changed" in line]


def test_other_data_are_refused_or_if_accepted_read_from_their_first_sample(
    ranks: RankPool, texts: dict[str, Path], tmp_path: Path
) -> None:
    source = ranks.train(tmp_path / "source", *OVERRIDES, *of_text(texts["one"], tmp_path), f"train.steps={SAVED}").folder
    overrides = (*of_text(texts["other"], tmp_path), f"train.steps={SAVED + 1}")
    refused = resume_from(ranks, source, tmp_path / "refused", *overrides)
    assert set(refused.codes) == {1}
    assert refused.problems[0].startswith(f"data.path was {texts['one']} when step 3 was saved, and is {texts['other']} now: ")
    job = resume_from(ranks, source, tmp_path / "run", *overrides, "checkpoint.accept=[data.path]")
    assert set(job.codes) == {0}, job.problems
    assert "the data are different: the run reads them from their first sample on" in job.lines
    extra: dict[str, Any] = newest_checkpoint(tmp_path / "run").extra
    assert (extra["samples"], extra["tokens"]) == (8, (SAVED + 1) * 8 * 16)


def test_a_changed_data_file_is_refused(ranks: RankPool, texts: dict[str, Path], tmp_path: Path) -> None:
    source = ranks.train(tmp_path / "source", *OVERRIDES, *of_text(texts["one"], tmp_path), f"train.steps={SAVED}").folder
    texts["one"].write_text("as it was never before\n" * 400)
    refused = resume_from(ranks, source, tmp_path / "run", *of_text(texts["one"], tmp_path), f"train.steps={SAVED + 1}")
    assert set(refused.codes) == {1}
    assert refused.problems[0].startswith(f"data.path={texts['one']} holds other tokens than when step 3 was saved: bring those back ")
