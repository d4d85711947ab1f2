"""Which checkpoints are kept and removed, beside readers too, and which one a run resumes from."""

import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from distrain.tests.fakes.one_weight import MANIFEST, WEIGHT, WEIGHTS, checkpoint, cut_short, flip, hidden_files, save, shards, value
from distrain.trainer.loop.checkpoint import (
    LoadFailed,
    choose_checkpoint,
    find_newest,
    latest_checkpoint,
    remove_leftovers,
    save_shards,
)
from distrain.trainer.loop.checkpoint.shard_file import MappedShards
from distrain.trainer.rundir.checkpoints import checkpoint_steps
from distrain.trainer.spec.problem import Unreadable

# --- what is kept


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_checkpoints_are_kept(tmp_path: Path, keep: int) -> None:
    for step in range(1, 6):
        save(tmp_path, step, keep=keep)
    assert checkpoint_steps(tmp_path) == [5, 4, 3, 2, 1][:keep]
    assert hidden_files(tmp_path) == []


def test_a_broken_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    cut_short(tmp_path / "step_2" / WEIGHT)
    save(tmp_path, 3, keep=2)
    assert checkpoint_steps(tmp_path) == [3, 1]


def test_broken_checkpoints_of_later_steps_are_set_aside_once_a_new_one_is_saved(tmp_path: Path) -> None:
    """A run that resumed from an older one must not go on from them if they verify again."""
    for step in (1, 8, 9, 10):
        save(tmp_path, step, keep=9)
    for step in (8, 9):
        flip(tmp_path / f"step_{step}" / WEIGHT)
    cut_short(tmp_path / "step_10" / WEIGHT)
    notes = save(tmp_path, 2, keep=1).notes
    says = "did not verify when the run began from an older one, and is set aside as suspect_step"
    assert notes == tuple(f"step_{step} {says}_{step}" for step in (9, 8))
    assert not (tmp_path / "step_10").exists(), "one that has lost bytes can't verify again"
    for step in (8, 9):
        flip(tmp_path / f"suspect_step_{step}" / WEIGHT)
    found = find_newest(tmp_path)
    assert (checkpoint(found).step, found.passed, latest_checkpoint(tmp_path)) == (2, (), tmp_path / "step_2")


def test_the_newest_checkpoint_from_before_the_last_good_check_of_devices_is_kept(tmp_path: Path) -> None:
    for step, keep, checked, left in ((1, 2, 0, [1]), (2, 2, 0, [2, 1]), (4, 2, 3, [4, 2]), (5, 2, 3, [5, 4, 2]), (6, 2, 3, [6, 5, 2]),
                                      (7, 2, 6, [7, 6]), (8, 1, 8, [8])):  # fmt: skip
        save_shards(tmp_path, step, shards(step), extra={}, keep=keep, checked=checked)
        assert checkpoint_steps(tmp_path) == left


def test_leftovers_of_killed_saves_are_removed_at_the_next_save_or_resume(tmp_path: Path) -> None:
    def leave() -> None:
        for name in (".step_3.tmp-0a1b", ".step_1.old-9"):
            (tmp_path / name).mkdir()
            (tmp_path / name / WEIGHT).write_text("x")
        (tmp_path / ".latest.tmp-7").write_text("step_3\n")
        (tmp_path / ".mine").write_text("not ours")

    save(tmp_path, 2)
    for tidy in (lambda: save(tmp_path, 3), lambda: choose_checkpoint(tmp_path, "auto", WEIGHTS), lambda: remove_leftovers(tmp_path)):
        leave()
        assert checkpoint(find_newest(tmp_path)).step in (2, 3)
        tidy()
        assert hidden_files(tmp_path) == [".mine"]


def test_a_leftover_that_cannot_be_removed_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    save(tmp_path, 2)
    (tmp_path / ".latest.tmp-7").write_text("step_3\n")
    monkeypatch.setattr(Path, "unlink", refuse)
    assert remove_leftovers(tmp_path) == [".latest.tmp-7"]


def test_concurrent_readers_find_checkpoints_that_verify(tmp_path: Path) -> None:
    save(tmp_path, 0, keep=1)
    done = threading.Event()

    def read() -> int:
        looks = 0
        while not done.is_set() or not looks:
            found = checkpoint(find_newest(tmp_path))
            try:
                assert value(found) == found.step
                looks += 1
            except LoadFailed as error:  # the writer went on, and this one was removed
                if found.path.exists():
                    raise AssertionError(found.path) from error
        return looks

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            for step in range(1, 60):
                save(tmp_path, step, keep=1)
        finally:
            done.set()
        assert all(reader.result() for reader in readers)


def test_a_file_that_is_removed_while_it_is_opened_raises_an_os_error(tmp_path: Path) -> None:
    save(tmp_path, 0)
    kept, seen = tmp_path / "step_0" / WEIGHT, tmp_path / "seen.safetensors"
    outcomes = Counter[str]()
    seen_again = "import os, sys\nwhile True:\n    os.link(*sys.argv[1:])\n    os.unlink(sys.argv[2])"
    with subprocess.Popen([sys.executable, "-c", seen_again, kept, seen]) as process:
        try:
            while min(outcomes["opened"], outcomes["removed"]) < 200:
                outcomes[open_outcome(seen)] += 1
        finally:
            process.kill()


def open_outcome(path: Path) -> str:
    try:
        MappedShards(path)
    except OSError:
        return "removed"
    return "opened"


# --- the policy


def problem(folder: Path, mode: Any, weights: dict[str, tuple[int, ...]] | None = None) -> tuple[str, str]:
    with pytest.raises(Unreadable) as refused:
        choose_checkpoint(folder, mode, WEIGHTS if weights is None else weights)
    (only,) = refused.value.problems
    return only.says, only.mend


def test_auto_resumes_from_a_checkpoint_or_starts_anew(tmp_path: Path) -> None:
    assert choose_checkpoint(tmp_path / "checkpoints", "auto", WEIGHTS).checkpoint is None
    save(tmp_path, 3)
    assert checkpoint(choose_checkpoint(tmp_path, "auto", WEIGHTS)).step == 3


def test_auto_does_not_start_anew_over_checkpoints_that_do_not_verify(tmp_path: Path) -> None:
    save(tmp_path, 3)
    cut_short(tmp_path / "step_3" / WEIGHT)
    assert problem(tmp_path, "auto") == (
        f"no checkpoint in {tmp_path} verifies (step_3: {WEIGHT} is 4119 bytes, not 4120)",
        "restore one of them, or set name=NEW to train another run",
    )
    assert choose_checkpoint(tmp_path, "never", WEIGHTS).checkpoint is None


def test_must_requires_a_checkpoint_that_verifies(tmp_path: Path) -> None:
    mend = "name a run that has saved one, or set checkpoint.resume=auto"
    assert problem(tmp_path, "must") == (f"checkpoint.resume=must, but no checkpoint in {tmp_path} verifies", mend)
    save(tmp_path, 3)
    assert checkpoint(choose_checkpoint(tmp_path, "must", WEIGHTS)).step == 3
    (tmp_path / "step_3" / MANIFEST).write_text("")
    assert problem(tmp_path, "must")[0].endswith("verifies (step_3: manifest.json is empty)")


def test_never_refuses_an_existing_checkpoint(tmp_path: Path) -> None:
    assert choose_checkpoint(tmp_path, "never", WEIGHTS).checkpoint is None
    save(tmp_path, 3)
    assert problem(tmp_path, "never") == (
        f"checkpoint.resume=never, but {tmp_path}/step_3 exists",
        "set checkpoint.resume=auto to go on from it, or log.dir to another folder",
    )


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"layers.0.weight": (50, 21)}, "layers.0.weight is 50 x 20 in {0}/step_3 and 50 x 21 in this model"),
        ({"a": (1,), "layers.0.weight": (50, 20)}, "{0}/step_3 holds no weight a, which this model has"),
        ({}, "{0}/step_3 holds a weight layers.0.weight, which this model does not have"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_the_first_difference(tmp_path: Path, weights, says: str) -> None:
    save(tmp_path, 3)
    assert problem(tmp_path, "auto", weights)[0] == says.format(tmp_path)
