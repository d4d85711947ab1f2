"""Search for the newest checkpoint that verifies, with the reasons why newer ones are passed over."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...launch.rank.channel import OnProgress, ignore_text
from ...rundir.checkpoints import BrokenCheckpoint, checkpoint_steps, size_problem, step_path
from ...system.cpu import cpu_count
from .manifest import Manifest, read_manifest
from .shard_file import ShardFile, file_sha256
from .work_on_all_ranks import Gather, gather_alone


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint whose manifest was read."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The steps that were done when it was saved."""
        return self.manifest.step

    @property
    def extra(self) -> dict[str, Any]:
        """What the run recorded besides tensors: its config, data position, engine counters, resume check."""
        return self.manifest.extra


@dataclass(frozen=True, kw_only=True)
class CheckpointSearch:
    """The newest checkpoint that verifies, or None, and a sentence for each newer one that was passed over."""

    checkpoint: SavedCheckpoint | None
    passed: tuple[str, ...]


def find_newest(
    folder: Path,
    *,
    quick: bool = False,
    rank: int = 0,
    world: int = 1,
    gather: Gather = gather_alone,
    on_progress: OnProgress = ignore_text,
) -> CheckpointSearch:
    """Find the newest checkpoint whose files all have the recorded sizes and hashes (quick: sizes only).

    Ranks that call this together hash a share of the files each and get the same result. If a checkpoint is removed meanwhile, the
    folder is listed again. `on_progress` is called with "hash" as hashing advances.
    """
    while True:
        listed = json.loads(gather(json.dumps(checkpoint_steps(folder)))[0])
        passed: list[str] = []
        for step in listed:
            path = step_path(folder, step)
            checkpoint, fault = _examine(path, quick=quick, rank=rank, world=world, on_progress=on_progress)
            fault = _first_nonempty(gather(fault))
            if not fault:
                return CheckpointSearch(checkpoint=checkpoint, passed=tuple(passed))
            passed.append(f"{path.name}: {fault}")
        removed = not set(listed) <= set(checkpoint_steps(folder))
        if not _first_nonempty(gather("removed" if removed else "")):
            return CheckpointSearch(checkpoint=None, passed=tuple(passed))


def _first_nonempty(lines: Iterable[str]) -> str:
    return next((line for line in lines if line), "")


def open_checkpoint(path: Path) -> SavedCheckpoint:
    """Open a checkpoint by its folder without verifying its files; raises BrokenCheckpoint where its manifest was damaged."""
    return SavedCheckpoint(path=path, manifest=read_manifest(path))


def verification_fault(path: Path, *, quick: bool = False, on_progress: OnProgress = ignore_text) -> str:
    """Return why a checkpoint does not verify; "" where its files have the recorded sizes and (unless quick) hashes."""
    return _examine(path, quick=quick, rank=0, world=1, on_progress=on_progress)[1]


def _examine(path: Path, *, quick: bool, rank: int, world: int, on_progress: OnProgress) -> tuple[SavedCheckpoint | None, str]:
    """Return a checkpoint and its fault or "", judged by every `world`-th of its files from number `rank` on."""
    try:
        found = open_checkpoint(path)
    except BrokenCheckpoint as error:
        return None, str(error)
    if path != step_path(path.parent, found.step):
        return None, f"it is of step {found.step}"
    files = sorted(found.manifest.files.items(), key=lambda item: -item[1].bytes)[rank::world]
    fault = _first_nonempty(size_problem(path / name, file.bytes) for name, file in files)
    if fault or quick or not files:
        return found, fault
    with ThreadPoolExecutor(min(len(files), cpu_count(), 8)) as pool:
        return found, _first_nonempty(pool.map(lambda item: _hash_fault(path / item[0], item[1], on_progress), files))


def _hash_fault(path: Path, file: ShardFile, on_progress: OnProgress) -> str:
    try:
        return "" if file_sha256(path, on_progress) == file.sha256 else f"{path.name} is not as it was written (its hash differs)"
    except OSError as error:
        return f"{path.name} can't be read ({(error.strerror or '').lower()})"
