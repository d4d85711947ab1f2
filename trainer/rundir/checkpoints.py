"""The checkpoints of a run as their names and manifests describe them: steps, seals, file sizes, weights, and the run that saved them."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..spec.plain_file import read_plain

MANIFEST = "manifest.json"
MOST_BYTES = 4 << 30  # of a manifest
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")
_OPENING, _CLOSING = b'{"sha256":"', b'",\n'
_SEAL = len(_OPENING) + 64 + len(_CLOSING)  # bytes of the seal; the hash is of the bytes after it


class Broken(Exception):
    """A checkpoint can't be trusted, for the reason that it says."""


def step_path(folder: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return folder / f"step_{step}"


def steps(folder: Path) -> list[int]:
    """List the steps that have a checkpoint's folder, whether it verifies or not, newest first."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted((step for name in names if (step := step_of(name)) is not None), reverse=True)


def step_of(name: str) -> int | None:
    """Return the step that a folder's name states; None where it is no checkpoint's name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def seal(body: bytes) -> bytes:
    """Put the hash of a manifest's text in front of it: the text is a JSON object without its opening brace."""
    return _OPENING + hashlib.sha256(body).hexdigest().encode() + _CLOSING + body


def read_sealed(folder: Path) -> bytes:
    """Read a checkpoint's manifest, seal included; raises Broken where it is missing or is not as it was written."""
    try:
        text = read_plain(folder / MANIFEST, MOST_BYTES)
    except OSError as error:
        raise Broken(f"{MANIFEST} can't be read ({(error.strerror or '').lower()})") from error
    if not text:
        raise Broken(f"{MANIFEST} is empty")
    if text != seal(text[_SEAL:]):
        raise Broken(f"{MANIFEST} is not as it was written (its hash differs)")
    return text


class _File(msgspec.Struct):
    bytes: int


class _Tensor(msgspec.Struct):
    name: str
    kind: str
    shape: tuple[int, ...]


class _Manifest(msgspec.Struct):
    step: int
    extra: dict[str, Any]
    files: dict[str, _File]
    tensors: list[_Tensor]


@dataclass(frozen=True, kw_only=True)
class SavedStep:
    """A checkpoint whose manifest and file sizes are as they were written; its files were not hashed.

    `extra` is what the run kept beside its tensors, `shapes` the logical shape of each weight, `kinds` what is stored of them:
    weight, exp_avg, ...
    """

    path: Path
    step: int
    extra: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    kinds: frozenset[str]


def newest_saved(folder: Path) -> tuple[SavedStep | None, tuple[str, ...]]:
    """Return the newest checkpoint whose manifest is sealed and whose files have their sizes, and why newer ones have not."""
    passed: list[str] = []
    for step in steps(folder):
        path = step_path(folder, step)
        try:
            return _saved_step(path, step), tuple(passed)
        except Broken as error:
            passed.append(f"{path.name}: {error}")
    return None, tuple(passed)


def _saved_step(path: Path, step: int) -> SavedStep:
    """Read a checkpoint's manifest and look at its files' sizes; raises Broken."""
    try:
        manifest = msgspec.json.decode(read_sealed(path), type=_Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Broken(f"{MANIFEST} is of another version of this format: {error}") from error
    if manifest.step != step:
        raise Broken(f"it is of step {manifest.step}")
    for name, file in manifest.files.items():
        if wrong := size_fault(path / name, file.bytes):
            raise Broken(wrong)
    return SavedStep(
        path=path,
        step=step,
        extra=manifest.extra,
        shapes={each.name: each.shape for each in manifest.tensors if each.kind == "weight"},
        kinds=frozenset(each.kind for each in manifest.tensors),
    )


def size_fault(path: Path, size: int) -> str:
    """Say why a file has not the size in bytes that it was written with; "" where it has."""
    try:
        found = path.stat().st_size
    except OSError:
        return f"{path.name} is not there"
    return "" if found == size else f"{path.name} is {found} bytes, not {size}"
