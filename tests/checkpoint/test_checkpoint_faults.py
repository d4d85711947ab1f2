"""Checkpoints, faults: damaged files, ranks that fail, full disks."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distrain.tests.fakes.one_weight import MANIFEST, PART, WEIGHT, WEIGHTS, checkpoint, cut_short, flip, hidden_files, save, shards, value
from distrain.tests.fakes.rank_threads import file_size_limit, try_on_ranks
from distrain.trainer.loop.checkpoint import (
    CheckpointSearch,
    LoadFailed,
    SaveFailed,
    Shard,
    choose_checkpoint,
    find_newest,
    gather_over,
    latest_checkpoint,
    read_slices,
    save_shards,
)

# --- what is there


def test_a_checkpoint_returns_its_step_tensors_and_extra(tmp_path: Path) -> None:
    said: dict[str, Any] = {"samples": 640, "losses": [4.25, 0.1], "scaler": {"scale": 65536.0}, "name": "x ⇒ y", "none": None}
    done = save(tmp_path, 40, **said)
    found = checkpoint(find_newest(tmp_path))
    assert (found.step, found.extra, found.path, value(found)) == (40, said, tmp_path / "step_40", 40.0)
    assert (done.path, done.bytes > 8000, done.fresh, done.notes) == (found.path, True, True, ())
    assert set(done.seconds) == {"check", "copy", "write", "hash", "sync", "publish", "remove", "total"}
    assert latest_checkpoint(tmp_path) == found.path


def test_a_checkpoint_has_no_pickles_and_a_json_manifest(tmp_path: Path) -> None:
    save(tmp_path, 4)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_4"]
    assert sorted(os.listdir(tmp_path / "step_4")) == ["exp_avg.0.0.safetensors", "manifest.json", "weight.0.0.safetensors"]
    said = json.loads((tmp_path / "step_4" / "manifest.json").read_text())
    assert (said["version"], said["step"]) == (1, 4)
    assert said["tensors"][1] == {
        "name": "layers.0.weight",
        "kind": "weight",
        "dtype": "float32",
        "shape": [50, 20],
        "slices": [{"file": "weight.0.0.safetensors", "offset": [0, 0], "size": [50, 20], "flat": None}],
    }
    done = subprocess.run(["sha256sum", tmp_path / "step_4" / "weight.0.0.safetensors"], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == said["files"]["weight.0.0.safetensors"]["sha256"]


@pytest.mark.parametrize("folder", ["nowhere", "."])
def test_a_folder_without_checkpoints_has_none(tmp_path: Path, folder: str) -> None:
    assert find_newest(tmp_path / folder) == CheckpointSearch(checkpoint=None, passed=())


def test_an_existing_step_that_verifies_is_not_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 4, first=True)
    (tmp_path / "latest").unlink()
    assert not save(tmp_path, 4, first=True).fresh
    assert latest_checkpoint(tmp_path) == tmp_path / "step_4"
    assert hidden_files(tmp_path) == []


def test_an_existing_step_of_an_attempt_that_trained_otherwise_is_replaced(tmp_path: Path) -> None:
    """It was passed over for a fault that has gone, and the run went on from an older one with another recipe."""
    save(tmp_path, 4, first=True)
    assert save(tmp_path, 4, first=False).fresh
    assert checkpoint(find_newest(tmp_path)).extra == {"first": False}
    assert hidden_files(tmp_path) == []


def test_a_checkpoint_whose_manifest_could_not_be_read_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr("distrain.trainer.loop.checkpoint.save.MOST_BYTES", 100)
    with pytest.raises(SaveFailed, match=r"its manifest.json would take .*, of which at most 100 B are read"):
        save(tmp_path, 2)
    assert checkpoint(find_newest(tmp_path)).step == 1


# --- damage

Damage = Callable[[Path], object]


ALTERED = "is not as it was written (its hash differs)"
# fmt: off
DAMAGE: dict[str, tuple[str, Damage, str]] = {
    "shard cut short":    (WEIGHT,   cut_short,                      f"{WEIGHT} is 4119 bytes, not 4120"),
    "shard emptied":      (WEIGHT,   lambda path: os.truncate(path, 0), f"{WEIGHT} is 0 bytes, not 4120"),
    "shard flipped":      (WEIGHT,   flip,                           f"{WEIGHT} {ALTERED}"),
    "header flipped":     (WEIGHT,   lambda path: flip(path, 0),     f"{WEIGHT} {ALTERED}"),
    "shard missing":      (WEIGHT,   os.remove,                      f"{WEIGHT} is missing"),
    "manifest missing":   (MANIFEST, os.remove,                      f"{MANIFEST} can't be read (no such file or directory)"),
    "manifest empty":     (MANIFEST, lambda path: os.truncate(path, 0), f"{MANIFEST} is empty"),
    "manifest cut short": (MANIFEST, cut_short,                      f"{MANIFEST} {ALTERED}"),
    "manifest flipped":   (MANIFEST, lambda path: flip(path, 90),    f"{MANIFEST} {ALTERED}"),
    "manifest not ours":  (MANIFEST, lambda path: path.write_text("{}"), f"{MANIFEST} {ALTERED}"),
}
# fmt: on


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(tmp_path: Path, case: str) -> None:
    name, damage, says = DAMAGE[case]
    save(tmp_path, 1)
    save(tmp_path, 2)
    damage(tmp_path / "step_2" / name)
    found = find_newest(tmp_path)
    assert (value(checkpoint(found)), found.passed) == (1.0, (f"step_2: {says}",))


def test_any_flipped_byte_of_a_manifest_is_detected(tmp_path: Path) -> None:
    save(tmp_path, 2)
    path = tmp_path / "step_2" / MANIFEST
    whole_text = path.read_bytes()
    for at in range(0, len(whole_text), 7):
        flip(path, at)
        assert find_newest(tmp_path).checkpoint is None, f"byte {at}"
        path.write_bytes(whole_text)


def test_a_quick_search_checks_sizes_and_a_full_one_hashes(tmp_path: Path) -> None:
    save(tmp_path, 2)
    flip(tmp_path / "step_2" / WEIGHT)
    assert checkpoint(find_newest(tmp_path, quick=True)).step == 2
    assert find_newest(tmp_path).checkpoint is None


def test_a_checkpoint_under_another_steps_name_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / "step_2").rename(tmp_path / "step_30")
    assert find_newest(tmp_path).passed == ("step_30: it is of step 2",)


@pytest.mark.parametrize("content", ["", "step_99\n", "nonsense", "../step_1"])
def test_resume_does_not_need_latest_and_corrects_it(tmp_path: Path, content: str) -> None:
    save(tmp_path, 1)
    (tmp_path / "latest").write_text(content)
    assert latest_checkpoint(tmp_path) in (None, tmp_path / "step_99")
    assert checkpoint(find_newest(tmp_path)).step == 1
    assert checkpoint(choose_checkpoint(tmp_path, "must", WEIGHTS)).step == 1
    assert latest_checkpoint(tmp_path) == tmp_path / "step_1"


def test_a_broken_checkpoint_is_replaced_when_its_step_is_saved_again(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    flip(tmp_path / "step_2" / WEIGHT)
    assert save(tmp_path, 2).fresh
    found = find_newest(tmp_path)
    assert (value(checkpoint(found)), found.passed, latest_checkpoint(tmp_path)) == (2.0, (), tmp_path / "step_2")
    assert hidden_files(tmp_path) == []


def test_loading_names_the_missing_file(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found = checkpoint(find_newest(tmp_path))
    (found.path / WEIGHT).unlink()
    with pytest.raises(LoadFailed, match=r"step_1/weight.0.0.safetensors can't be read: "):
        read_slices(found, [PART])


def test_loading_an_incomplete_tensor_names_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found = checkpoint(find_newest(tmp_path))
    row = found.manifest.rows()["layers.0.weight", "weight"]
    for slices, says in (((), "0 of its 0 elements are there"), (row.slices * 2, "two of its slices overlap")):
        manifest = replace(found.manifest, tensors=(replace(row, slices=slices),))
        with pytest.raises(LoadFailed) as failed:
            read_slices(replace(found, manifest=manifest), [PART])
        assert str(failed.value) == f"layers.0.weight (weight) in step_1: {says}"


# --- several ranks


def save_on(folder: Path, step: int, parts: list[list[Shard]]) -> list[Any]:
    return try_on_ranks(
        len(parts),
        lambda rank, gather: save_shards(folder, step, parts[rank], extra={}, keep=2, rank=rank, world=len(parts), gather=gather),
    )


def test_ranks_share_the_hashing_and_get_the_same_result(tmp_path: Path) -> None:
    weight, moment = shards(1)
    save_on(tmp_path, 1, [[weight], [moment]])
    save_on(tmp_path, 2, [[weight], [moment]])
    flip(tmp_path / "step_2" / "exp_avg.1.0.safetensors")
    one, other = try_on_ranks(2, lambda rank, gather: find_newest(tmp_path, rank=rank, world=2, gather=gather))
    assert one == other == find_newest(tmp_path)
    assert one.passed == (f"step_2: exp_avg.1.0.safetensors {ALTERED}",)


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_no_files(tmp_path: Path) -> None:
    weight, moment = shards(1)
    save_on(tmp_path, 1, [[weight], [moment]])
    failed = save_on(tmp_path, 2, [[weight], [moment, moment]])
    says = "step 2 was not saved: layers.0.weight (exp_avg) is there twice (rank 1)"
    assert [(type(error), str(error)) for error in failed] == [(SaveFailed, says)] * 2
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_1"]


def test_an_exception_of_the_shard_iterator_fails_the_save(tmp_path: Path) -> None:
    def failing_shards() -> Iterator[Shard]:
        yield shards(1)[0]
        raise RuntimeError("device lost")

    with pytest.raises(SaveFailed, match=r"^step 1 was not saved: RuntimeError: device lost$"):
        save_shards(tmp_path, 1, failing_shards(), extra={}, keep=1)


def test_extra_that_is_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SaveFailed, match="JSON"):
        save(tmp_path, 1, loss=float("nan"))
    assert list(tmp_path.iterdir()) == []


def test_a_process_group_gathers_lines(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        assert list(gather_over()("a line")) == ["a line"]
    finally:
        dist.destroy_process_group()


# --- full disks


def fill_up(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_a_save_without_room_is_not_started(disk: Path) -> None:
    save(disk, 1)
    with pytest.raises(SaveFailed, match=r"^step 2 was not saved: 1.59 MiB are needed in .* and (1,0\d\d|9\d\d) KiB are free$"):
        save(disk, 2, elements=200_000)
    assert sorted(os.listdir(disk)) == ["latest", "step_1"]
    assert save(disk, 3).fresh


@pytest.mark.parametrize("moment", [1, 2])
def test_a_disk_that_fills_up_during_a_save_loses_nothing(disk: Path, moment: int) -> None:
    save(disk, 1)
    calls = 0

    def filling(line: str) -> Sequence[str]:  # the first gather ends the check, the second the writing of shards
        nonlocal calls
        calls += 1
        if calls == moment:
            fill_up(disk / "other")
        return [line]

    with pytest.raises(SaveFailed, match=r"^step 2 was not saved: the disk is full"):
        save_shards(disk, 2, shards(2, 40_000), extra={}, keep=1, gather=filling)
    assert sorted(os.listdir(disk)) == ["latest", "other", "step_1"]
    assert value(checkpoint(find_newest(disk))) == 1.0
    (disk / "other").unlink()
    assert value(checkpoint(find_newest(save(disk, 3, keep=1).path.parent))) == 3.0


@pytest.mark.parametrize(("elements", "extra"), [(40_000, 0), (1000, 100_000)], ids=["a shard", "the manifest"])
def test_a_file_size_limit_fails_the_save_and_loses_nothing(tmp_path: Path, elements: int, extra: int) -> None:
    save(tmp_path, 1)
    with file_size_limit(60_000), pytest.raises(SaveFailed, match=r"^step 2 was not saved: a file would be larger than .* \(ulimit -f\)"):
        save(tmp_path, 2, elements=elements, text="x" * extra)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_1"]
    assert save(tmp_path, 2).fresh


def test_a_folder_that_can_not_be_created_fails_the_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveFailed, match=r"^step 2 was not saved: (file exists|not a directory): .*file"):
        save(tmp_path / "file" / "checkpoints", 2)
