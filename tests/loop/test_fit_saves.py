"""Saves that are long, disks that are full, losses that are small: what the checkpoints of a run do besides holding it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from distrain.tests.fakes.rank_threads import on_ranks
from distrain.trainer.launch.rank.channel import Talk
from distrain.trainer.loop.checkpoint import Gather, Saved, SaveFailed, Shard, latest, newest, resume, save, shard_file, whole
from distrain.trainer.rundir.checkpoints import steps

if TYPE_CHECKING:
    from distrain.tests.conftest import Ranks

WEIGHTS = {"layers.0.weight": (50, 20)}


def shards(step: int, elements: int = 1000) -> list[Shard]:
    """A model of one weight whose every element says its step."""
    shape = (elements // 20, 20)
    return [Shard(slice=whole("layers.0.weight", kind, shape), tensor=torch.full(shape, float(step))) for kind in ("weight", "exp_avg")]


def saved(folder: Path, step: int, *, keep: int = 9, elements: int = 1000, **further: Any) -> Saved:
    return save(folder, step, shards(step, elements), extra={}, keep=keep, **further)


# That it gets on


def test_a_save_tells_that_it_gets_on_with_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "CHUNK", 1000)
    told: list[str] = []
    saved(tmp_path, 1, pulse=told.append)
    assert [word for word, before in zip(told, ["", *told], strict=False) if word != before] == ["write", "publish"]
    assert told.count("write") == 2 * (1 + 4)  # of each file its header, and 4000 bytes


@pytest.mark.parametrize("after", [1, 2000, 1 << 30])
def test_what_is_written_is_put_on_the_disk_as_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    monkeypatch.setattr(shard_file, "CHUNK", 1000)
    monkeypatch.setattr(shard_file, "SYNCED", after)
    saved(tmp_path, 1)
    found = newest(tmp_path)
    assert found.checkpoint
    assert found.passed == ()


def test_the_hashing_at_a_start_tells_that_it_gets_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "HASHED", 1000)
    saved(tmp_path, 1)
    told: list[str] = []
    resume(tmp_path, "must", WEIGHTS, pulse=told.append)
    assert set(told) == {"hash"}
    assert len(told) >= 2 * 4


def test_a_rank_says_once_a_second_that_it_gets_on_and_at_once_that_it_is_at_something_else() -> None:
    hear, speak = os.pipe()
    talk = Talk(speak)
    with ThreadPoolExecutor(4) as threads:
        for name in ("hash", "read"):
            list(threads.map(talk.pulse, [name] * 1000))
    os.close(speak)
    with open(hear) as lines:
        said = [json.loads(line)["phase"] for line in lines]
    assert {*said} == {"hash", "read"}
    assert len(said) < 100, "not each of two thousand"
    assert said.index("read") >= said.count("hash") - 4  # of four threads each may have been about to say the other


# Room


LARGE = 30_000  # elements of which a checkpoint takes a quarter of the disk


def test_where_no_more_fit_the_oldest_make_room(disk: Path) -> None:
    """Three are there; of a fourth, what it needs with what is kept beside it does not fit."""
    notes = [saved(disk, step, elements=LARGE).notes for step in range(1, 6)]
    assert steps(disk) == [5, 4, 3]
    assert notes[2:] == [(), ("step_1 was removed to make room",), ("step_2 was removed to make room",)]
    found = newest(disk)
    assert found.checkpoint
    assert (found.checkpoint.step, found.passed, latest(disk)) == (5, (), disk / "step_5")


def flip(path: Path) -> None:
    held = bytearray(path.read_bytes())
    held[-1] ^= 1
    path.write_bytes(held)


def test_the_newest_that_verifies_makes_no_room(disk: Path) -> None:
    for step in (1, 2, 3):
        saved(disk, step, elements=LARGE)
    for step in (2, 3):
        flip(disk / f"step_{step}" / "weight.0.0.safetensors")
    with pytest.raises(SaveFailed, match="are needed in"):
        saved(disk, 4, elements=LARGE)
    assert steps(disk) == [3, 2, 1]


def test_nothing_makes_room_for_what_would_not_fit_even_so(disk: Path) -> None:
    for step in (1, 2, 3):
        saved(disk, step, elements=LARGE)
    with pytest.raises(SaveFailed, match="are needed in"):
        saved(disk, 4, elements=5 * LARGE)
    assert steps(disk) == [3, 2, 1]


def test_a_disk_that_fills_up_while_it_is_written_to_makes_room_too(disk: Path) -> None:
    for step in (1, 2, 3):
        saved(disk, step, elements=20_000)
    calls = 0

    def filling(line: str) -> Sequence[str]:  # the first gather ends the check, the second the writing of shards
        nonlocal calls
        calls += 1
        if calls == 1:
            with (disk / "other").open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass
        return [line]

    made = saved(disk, 4, elements=20_000, gather=filling)
    assert made.notes == ("step_1 was removed to make room", "step_2 was removed to make room")
    assert steps(disk) == [4, 3]
    assert not [name for name in os.listdir(disk) if name.startswith(".")]


def test_ranks_that_save_together_make_room_together(disk: Path) -> None:
    def work(rank: int, gather: Gather) -> list[tuple[str, ...]]:
        return [
            save(disk, step, [shards(step, LARGE)[rank]], extra={}, keep=9, rank=rank, world=2, gather=gather).notes
            for step in (1, 2, 3, 4)
        ]

    first, second = on_ranks(2, work)
    assert first == second == [(), (), (), ("step_1 was removed to make room",)]
    assert steps(disk) == [4, 3, 2]


def test_the_folder_of_checkpoints_outlasts_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name in RUN_DIR is synced when it is made."""
    synced: list[str] = []
    right = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        right(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    for step in (1, 2):
        saved(tmp_path / "checkpoints", step)
    assert synced.count(str(tmp_path)) == 1
    assert synced[0] == str(tmp_path)


# Small losses


def test_a_loss_near_nothing_goes_on_in_another_layout(ranks: Ranks, tmp_path: Path) -> None:
    """A text that is soon known: what is left of the loss is rounding."""
    (tmp_path / "a.txt").write_text("abcdefgh" * 600)
    words = (
        "quickstart", "model=tiny", "model.layers=2", "data=text", f"data.path={tmp_path / 'a.txt'}", f"data.cache={tmp_path / 'cache'}",
        "train.batch=8", "train.seq=16", "train.microbatch=2", "train.evaluate.every=0", "log.every=1", "optim.warmup=0",
        "optim.schedule=constant", "optim.lr=1e-2", "optim.weight_decay=0",
    )  # fmt: skip
    assert ranks.trained(tmp_path / "run", *words, "train.steps=120").figures("loss")[-1] < 1e-3
    for step, layout in ((121, "parallel.tp=2"), (122, "parallel.pp=2"), (123, "parallel.zero=3")):
        job = ranks.trained(tmp_path / "run", *words, f"train.steps={step}", "cluster.gpus=2", layout)
        assert f"goes on from step {step - 1}" in job.said
