"""Checkpoints: progress of long saves, room on full disks, resume checks of small losses."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from distrain.tests.fakes.rank_threads import run_on_ranks
from distrain.trainer.launch.rank.channel import STOPPED, Channel
from distrain.trainer.loop.checkpoint import (
    Gather,
    SaveFailed,
    SaveResult,
    Shard,
    choose_checkpoint,
    find_newest,
    latest_checkpoint,
    save_shards,
    shard_file,
    whole_slice,
)
from distrain.trainer.rundir.checkpoints import checkpoint_steps

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

WEIGHTS = {"layers.0.weight": (50, 20)}


def shards(step: int, elements: int = 1000) -> list[Shard]:
    """A model of one weight, whose elements all equal the step."""
    shape = (elements // 20, 20)
    return [
        Shard(slice=whole_slice("layers.0.weight", kind, shape), tensor=torch.full(shape, float(step))) for kind in ("weight", "exp_avg")
    ]


def save(folder: Path, step: int, *, keep: int = 9, elements: int = 1000, **further: Any) -> SaveResult:
    return save_shards(folder, step, shards(step, elements), extra={}, keep=keep, **further)


# Progress


def test_a_save_reports_progress_as_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "WRITE_BYTES", 1000)
    progress: list[str] = []
    save(tmp_path, 1, on_progress=progress.append)
    assert [name for name, before in zip(progress, ["", *progress], strict=False) if name != before] == ["write", "publish"]
    assert progress.count("write") == 2 * (1 + 4)  # for each file its header, and 4000 bytes


@pytest.mark.parametrize("after", [1, 2000, 1 << 30])
def test_files_are_synced_while_they_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    monkeypatch.setattr(shard_file, "WRITE_BYTES", 1000)
    monkeypatch.setattr(shard_file, "SYNC_BYTES", after)
    save(tmp_path, 1)
    found = find_newest(tmp_path)
    assert found.checkpoint
    assert found.passed == ()


def test_hashing_reports_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "HASH_BYTES", 1000)
    save(tmp_path, 1)
    progress: list[str] = []
    choose_checkpoint(tmp_path, "must", WEIGHTS, on_progress=progress.append)
    assert set(progress) == {"hash"}
    assert len(progress) >= 2 * 4


def test_progress_is_sent_once_a_second_and_a_new_phase_at_once() -> None:
    reader, writer = os.pipe()
    channel = Channel(writer)
    with ThreadPoolExecutor(4) as threads:
        for name in ("hash", "read"):
            list(threads.map(channel.report_progress, [name] * 1000))
    os.close(writer)
    with open(reader) as lines:
        phases = [json.loads(line)["phase"] for line in lines]
    assert {*phases} == {"hash", "read"}
    assert len(phases) < 100, "not one for each call"
    assert phases.index("read") >= phases.count("hash") - 4  # each of four threads may have been about to send the other


# Room


LARGE = 30_000  # elements; a checkpoint of them takes a quarter of the disk


def test_the_oldest_checkpoints_are_removed_to_make_room(disk: Path) -> None:
    """Three checkpoints fit; a fourth does not."""
    notes = [save(disk, step, elements=LARGE).notes for step in range(1, 6)]
    assert checkpoint_steps(disk) == [5, 4, 3]
    assert notes[2:] == [(), ("step_1 was removed to make room",), ("step_2 was removed to make room",)]
    found = find_newest(disk)
    assert found.checkpoint
    assert (found.checkpoint.step, found.passed, latest_checkpoint(disk)) == (5, (), disk / "step_5")


def flip(path: Path) -> None:
    held = bytearray(path.read_bytes())
    held[-1] ^= 1
    path.write_bytes(held)


def test_the_newest_checkpoint_that_verifies_is_never_removed_to_make_room(disk: Path) -> None:
    for step in (1, 2, 3):
        save(disk, step, elements=LARGE)
    for step in (2, 3):
        flip(disk / f"step_{step}" / "weight.0.0.safetensors")
    with pytest.raises(SaveFailed, match="are needed in"):
        save(disk, 4, elements=LARGE)
    assert checkpoint_steps(disk) == [3, 2, 1]


def test_nothing_is_removed_if_that_would_not_free_enough(disk: Path) -> None:
    for step in (1, 2, 3):
        save(disk, step, elements=LARGE)
    with pytest.raises(SaveFailed, match="are needed in"):
        save(disk, 4, elements=5 * LARGE)
    assert checkpoint_steps(disk) == [3, 2, 1]


def test_room_is_made_on_a_disk_that_fills_up_during_a_save(disk: Path) -> None:
    for step in (1, 2, 3):
        save(disk, step, elements=20_000)
    calls = 0

    def filling(line: str) -> Sequence[str]:  # the first gather ends the check, the second the writing of shards
        nonlocal calls
        calls += 1
        if calls == 1:
            with (disk / "other").open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass
        return [line]

    made = save(disk, 4, elements=20_000, gather=filling)
    assert made.notes == ("step_1 was removed to make room", "step_2 was removed to make room")
    assert checkpoint_steps(disk) == [4, 3]
    assert not [name for name in os.listdir(disk) if name.startswith(".")]


def test_ranks_make_room_together(disk: Path) -> None:
    def work(rank: int, gather: Gather) -> list[tuple[str, ...]]:
        return [
            save_shards(disk, step, [shards(step, LARGE)[rank]], extra={}, keep=9, rank=rank, world=2, gather=gather).notes
            for step in (1, 2, 3, 4)
        ]

    first, second = run_on_ranks(2, work)
    assert first == second == [(), (), (), ("step_1 was removed to make room",)]
    assert checkpoint_steps(disk) == [4, 3, 2]


def test_the_folder_of_checkpoints_survives_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RUN_DIR is synced when the folder is created."""
    synced: list[str] = []
    real_fsync = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real_fsync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    for step in (1, 2):
        save(tmp_path / "checkpoints", step)
    assert synced.count(str(tmp_path)) == 1
    assert synced[0] == str(tmp_path)


# When a run saves

SMALL = ("quickstart", "model=tiny", "model.layers=2", "data=synthetic", "train.steps=5", "train.evaluate.every=0", "optim.warmup=0")


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ((), [5]),
        (("checkpoint.every=2",), [5, 4]),
        (("checkpoint.final=false",), []),
        (("checkpoint.every=2", "checkpoint.final=false"), [4, 2]),
    ],
)
def test_a_run_saves_at_an_interval_and_after_its_last_step(
    ranks: RankPool, tmp_path: Path, words: tuple[str, ...], steps: list[int]
) -> None:
    job = ranks.train(tmp_path / "run", *SMALL, *words, "checkpoint.keep=2", "log.every=1")
    assert checkpoint_steps(job.folder / "checkpoints") == steps
    assert [row["step"] for row in job.saves][::-1][:2] == steps
    assert len([line for line in job.lines if line.startswith("step ")]) == 5, "a save has no line of a step"
    assert len(job.figures("loss")) == 5


def test_a_run_that_saves_nothing_begins_again(ranks: RankPool, tmp_path: Path) -> None:
    words = (*SMALL, "checkpoint.final=false", "log.every=1")
    first, again = (ranks.train(tmp_path / "run", *words).rows for _ in range(2))
    losses = [row["loss"] for row in first if "loss" in row]
    assert [row["loss"] for row in again if "loss" in row] == 2 * losses


def test_a_run_that_is_stopped_saves_in_any_case(ranks: RankPool, tmp_path: Path) -> None:
    job = ranks.fit(tmp_path / "run", *SMALL, "checkpoint.final=false", signals=[(1, 0, signal.SIGTERM)])
    assert set(job.codes) == {STOPPED}
    (step,) = checkpoint_steps(job.folder / "checkpoints")
    assert f"resumes from step {step}" in ranks.train(tmp_path / "run", *SMALL, "checkpoint.final=false").lines


def test_a_pipeline_without_a_flush_reports_its_last_steps_though_it_saves_none(ranks: RankPool, tmp_path: Path) -> None:
    layout = ("parallel.pp=2", "cluster.gpus=2", "parallel.schedule=pipedream", "train.microbatch=1", "model.tied=false")
    job = ranks.train(tmp_path / "run", *SMALL, *layout, "checkpoint.final=false", "log.every=1")
    assert [row["step"] for row in job.rows if "loss" in row] == [1, 2, 3, 4, 5]


# Small losses


def test_a_run_with_a_tiny_loss_resumes_in_another_layout(ranks: RankPool, tmp_path: Path) -> None:
    """A text that is quickly memorized: the rest of the loss is rounding."""
    (tmp_path / "a.txt").write_text("abcdefgh" * 600)
    overrides = (
        "quickstart", "model=tiny", "model.layers=2", "data=text", f"data.path={tmp_path / 'a.txt'}", f"data.cache={tmp_path / 'cache'}",
        "train.batch=8", "train.seq=16", "train.microbatch=2", "train.evaluate.every=0", "log.every=1", "optim.warmup=0",
        "optim.schedule=constant", "optim.lr=1e-2", "optim.weight_decay=0",
    )  # fmt: skip
    assert ranks.train(tmp_path / "run", *overrides, "train.steps=120").figures("loss")[-1] < 1e-3
    for step, layout in ((121, "parallel.tp=2"), (122, "parallel.pp=2"), (123, "parallel.zero=3")):
        job = ranks.train(tmp_path / "run", *overrides, f"train.steps={step}", "cluster.gpus=2", layout)
        assert f"resumes from step {step - 1}" in job.lines
