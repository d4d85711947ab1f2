"""The newest checkpoint that verifies, and why newer ones were passed over."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...launch.rank.channel import Pulse, hush
from ...rundir.checkpoints import Broken, size_fault, step_path, steps
from . import manifest as manifests
from .agreement import Gather, alone
from .manifest import Manifest
from .shard_file import File, sha256


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose manifest was read."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self.manifest.step

    @property
    def extra(self) -> dict[str, Any]:
        """What the run asked to be kept: data position, schedules, first losses, fingerprint."""
        return self.manifest.extra


@dataclass(frozen=True, kw_only=True)
class Found:
    """The newest checkpoint that verifies (None: there is none), and a sentence for each newer one that does not."""

    checkpoint: Checkpoint | None
    passed: tuple[str, ...]


def newest(folder: Path, *, quick: bool = False, rank: int = 0, world: int = 1, gather: Gather = alone, pulse: Pulse = hush) -> Found:
    """Find the newest checkpoint whose files all have their size and hash (quick: their size).

    Where several ranks ask together, each hashes its share of the files and all get the same answer. A checkpoint that is
    removed while it is looked at is no fault: the folder is listed again. `pulse` is told "hash" as often as that gets on.
    """
    while True:
        listed = json.loads(gather(json.dumps(steps(folder)))[0])
        passed: list[str] = []
        for step in listed:
            path = step_path(folder, step)
            checkpoint, wrong = _examined(path, quick=quick, rank=rank, world=world, pulse=pulse)
            wrong = _first(gather(wrong))
            if not wrong:
                return Found(checkpoint=checkpoint, passed=tuple(passed))
            passed.append(f"{path.name}: {wrong}")
        gone = not set(listed) <= set(steps(folder))
        if not _first(gather("gone" if gone else "")):
            return Found(checkpoint=None, passed=tuple(passed))


def _first(lines: Iterable[str]) -> str:
    return next((line for line in lines if line), "")


def opened(path: Path) -> Checkpoint:
    """A checkpoint by its folder, its files not looked at; raises Broken where its manifest is not as it was written."""
    return Checkpoint(path=path, manifest=manifests.read(path))


def fault(path: Path, *, quick: bool = False, pulse: Pulse = hush) -> str:
    """Why a checkpoint does not verify, in words; "" where its files have their sizes and (unless quick) hashes."""
    return _examined(path, quick=quick, rank=0, world=1, pulse=pulse)[1]


def _examined(path: Path, *, quick: bool, rank: int, world: int, pulse: Pulse) -> tuple[Checkpoint | None, str]:
    """A checkpoint and what is wrong with it, judged by every `world`-th of its files."""
    try:
        found = opened(path)
    except Broken as error:
        return None, str(error)
    if path != step_path(path.parent, found.step):
        return None, f"it is of step {found.step}"
    files = sorted(found.manifest.files.items(), key=lambda item: -item[1].bytes)[rank::world]
    wrong = _first(size_fault(path / name, file.bytes) for name, file in files)
    if wrong or quick or not files:
        return found, wrong
    with ThreadPoolExecutor(min(len(files), os.cpu_count() or 1, 8)) as pool:
        return found, _first(pool.map(lambda item: _hash_fault(path / item[0], item[1], pulse), files))


def _hash_fault(path: Path, file: File, pulse: Pulse) -> str:
    try:
        return "" if sha256(path, pulse) == file.sha256 else f"{path.name} is not as it was written (its hash differs)"
    except OSError as error:
        return f"{path.name} can't be read ({(error.strerror or '').lower()})"
