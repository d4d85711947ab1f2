"""The names in a folder of checkpoints, and the moves in it that a crash can't tear: rename, `latest`, removal."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...rundir.checkpoints import step_of

LATEST = "latest"
_LEFTOVER = re.compile(r"\.(step_[0-9]+|latest)\.(tmp|old)-[0-9a-f]+")


def beside(path: Path, why: str) -> Path:
    """A hidden name of its own for what is to become (`tmp`) or what was (`old`) a path."""
    return path.with_name(f".{path.name}.{why}-{secrets.token_hex(4)}")


def make(folder: Path) -> None:
    """Make the folder where it is not there, so that its name lasts."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)


def sweep(folder: Path) -> list[str]:
    """Remove what killed saves left behind, and say what that was. For the one run that writes to this folder."""
    left = [name for name in sorted(os.listdir(folder)) if _LEFTOVER.fullmatch(name)] if folder.is_dir() else []
    for name in left:
        clear(folder / name)
    return left


def clear(path: Path) -> None:
    """Remove a file or folder as far as that goes; what stays is a leftover for the next sweep."""
    shutil.rmtree(path, ignore_errors=True)
    if path.is_file():
        path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a checkpoint: first its name in one move, then its files. Raises OSError where the name stays."""
    old = beside(path, "old")
    path.rename(old)
    clear(old)


def sync(folder: Path) -> None:
    """Make the names in a folder last through a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, content: bytes) -> None:
    """Write a new small file through to the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def latest(folder: Path) -> Path | None:
    """The checkpoint that `latest` names; None where there is none. For people and tools: `newest` looks for itself."""
    try:
        name = (folder / LATEST).read_text().strip()
    except OSError:
        return None
    return folder / name if step_of(name) is not None else None


def point(path: Path) -> None:
    """Have `latest` name a checkpoint; raises OSError where it stays as it was."""
    with _pointer(path) as pointer:
        _turn(pointer, path.parent)


def publish(temporary: Path, path: Path) -> None:
    """Give a complete checkpoint its name, then have `latest` name it; raises OSError with neither or only the first done.

    What `latest` is to be is on the disk before the first move, so that a full disk stops both or none. A broken
    checkpoint of that name gives way, and where `latest` names it, that goes first.
    """
    with _pointer(path) as pointer:
        if path.exists():
            if latest(path.parent) == path:
                (path.parent / LATEST).unlink()
            remove(path)
        temporary.rename(path)
        sync(path.parent)
        _turn(pointer, path.parent)


@contextmanager
def _pointer(path: Path) -> Iterator[Path]:
    """What `latest` is to be, written under a hidden name, which does not outlast a failure."""
    pointer = beside(path.parent / LATEST, "tmp")
    try:
        write_synced(pointer, f"{path.name}\n".encode())
        yield pointer
    except OSError:
        clear(pointer)
        raise


def _turn(pointer: Path, folder: Path) -> None:
    pointer.replace(folder / LATEST)
    sync(folder)
