"""A run's checkpoints, read without torch: their steps, sealed manifests, file sizes, weights and the runs that saved them."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from ..system.regular_file import read_plain

MANIFEST = "manifest.json"
ASIDE = "suspect_"  # in front of the name of a checkpoint that was set aside; no run resumes from it, and none removes it
MOST_BYTES = 4 << 30  # of a manifest
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")
_OPENING, _CLOSING = b'{"sha256":"', b'",\n'
_SEAL = len(_OPENING) + 64 + len(_CLOSING)  # bytes of the seal, whose hash covers the bytes after it


class BrokenCheckpoint(Exception):
    """A checkpoint that can't be trusted; the message says why."""


def checkpoints_folder(run_folder: Path) -> Path:
    """Return the folder in which a run's checkpoints are."""
    return run_folder / "checkpoints"


def has_checkpoints(run_folder: Path) -> bool:
    """Whether a run folder has a folder of a checkpoint, verified or not; raises OSError where that can't be read."""
    return any(checkpoints_folder(run_folder).glob("step_*"))


def step_path(folder: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return folder / f"step_{step}"


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint folder, verified or not, newest first."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted((step for name in names if (step := step_number(name)) is not None), reverse=True)


def step_number(name: str) -> int | None:
    """Return the step that a folder's name states; None where it is not a checkpoint's."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def name_aside(path: Path) -> Path:
    """Return a new name for a checkpoint that is set aside."""
    names = (path.parent / f"{ASIDE}{path.name}{f'.{number}' if number else ''}" for number in count())
    return next(name for name in names if not name.exists())


def seal(body: bytes) -> bytes:
    """Return a manifest's text with its hash in front; `body` is a JSON object without its opening brace."""
    return _OPENING + hashlib.sha256(body).hexdigest().encode() + _CLOSING + body


def read_sealed(folder: Path) -> bytes:
    """Read a checkpoint's manifest, seal included; raises BrokenCheckpoint where it is missing or is not as it was written."""
    try:
        text = read_plain(folder / MANIFEST, MOST_BYTES)
    except OSError as error:
        raise BrokenCheckpoint(f"{MANIFEST} can't be read ({(error.strerror or '').lower()})") from error
    if not text:
        raise BrokenCheckpoint(f"{MANIFEST} is empty")
    if text != seal(text[_SEAL:]):
        raise BrokenCheckpoint(f"{MANIFEST} is not as it was written (its hash differs)")
    return text


class _ManifestFile(msgspec.Struct):
    bytes: int


class _ManifestTensor(msgspec.Struct):
    name: str
    kind: str
    shape: tuple[int, ...]


class _Manifest(msgspec.Struct):
    step: int
    extra: dict[str, Any]
    files: dict[str, _ManifestFile]
    tensors: list[_ManifestTensor]


@dataclass(frozen=True, kw_only=True)
class SavedStep:
    """A checkpoint whose manifest and file sizes are intact; its files were not hashed.

    `extra` is what the run saved besides its tensors, `shapes` the logical shape of each weight, `kinds` the kinds of its tensors:
    weight, exp_avg, ...
    """

    path: Path
    step: int
    extra: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    kinds: frozenset[str]


def newest_saved(folder: Path, most: int | None = None) -> tuple[SavedStep | None, tuple[str, ...]]:
    """Return the newest checkpoint, of those up to step `most`, whose manifest and file sizes are intact, and why each newer one was
    passed over."""
    passed: list[str] = []
    for step in (each for each in checkpoint_steps(folder) if most is None or each <= most):
        path = step_path(folder, step)
        try:
            return _read_saved_step(path, step), tuple(passed)
        except BrokenCheckpoint as error:
            passed.append(f"{path.name}: {error}")
    return None, tuple(passed)


def _read_saved_step(path: Path, step: int) -> SavedStep:
    """Read a checkpoint's manifest and look at its files' sizes; raises BrokenCheckpoint."""
    try:
        manifest = msgspec.json.decode(read_sealed(path), type=_Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BrokenCheckpoint(f"{MANIFEST} is of another version of this format: {error}") from error
    if manifest.step != step:
        raise BrokenCheckpoint(f"it is of step {manifest.step}")
    for name, file in manifest.files.items():
        if wrong := size_problem(path / name, file.bytes):
            raise BrokenCheckpoint(wrong)
    return SavedStep(
        path=path,
        step=step,
        extra=manifest.extra,
        shapes={each.name: each.shape for each in manifest.tensors if each.kind == "weight"},
        kinds=frozenset(each.kind for each in manifest.tensors),
    )


def size_problem(path: Path, size: int) -> str:
    """Return why a file does not have the `size` in bytes that was written; "" where it has."""
    try:
        found = path.stat().st_size
    except OSError:
        return f"{path.name} is missing"
    return "" if found == size else f"{path.name} is {found} bytes, not {size}"
