"""The folder of checkpoints: publishing, `latest` and removal, so that a crash leaves every checkpoint complete or absent."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...rundir.checkpoints import step_number

LATEST = "latest"
_LEFTOVER = re.compile(r"\.(step_[0-9]+|latest)\.(tmp|old)-[0-9a-f]+")


def hidden_name(path: Path, why: str) -> Path:
    """Return a unique hidden path next to `path`: `why` is "tmp" for its future content, "old" for its former content."""
    return path.with_name(f".{path.name}.{why}-{secrets.token_hex(4)}")


def make_folder(folder: Path) -> None:
    """Create the folder if it does not exist, durably."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)


def remove_leftovers(folder: Path) -> list[str]:
    """Remove what killed saves have left, and return the names. Only the run that writes to this folder may call this."""
    left = [name for name in sorted(os.listdir(folder)) if _LEFTOVER.fullmatch(name)] if folder.is_dir() else []
    for name in left:
        remove_files(folder / name)
    return left


def remove_files(path: Path) -> None:
    """Remove a file or folder; what can't be removed is left for the next `remove_leftovers`."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        if path.is_file():
            path.unlink(missing_ok=True)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint: first its name, in one rename, then its files. Raises OSError where the name can't be removed."""
    old = hidden_name(path, "old")
    path.rename(old)
    remove_files(old)


def sync_folder(folder: Path) -> None:
    """Write a folder's entries through to the disk, so that they survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, content: bytes) -> None:
    """Create a small file and write it through to the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that `latest` names, or None. It is for people and tools: `find_newest` does not read it."""
    try:
        name = (folder / LATEST).read_text().strip()
    except OSError:
        return None
    return folder / name if step_number(name) is not None else None


def point_latest(path: Path) -> None:
    """Make `latest` name a checkpoint; raises OSError where it is unchanged."""
    with _write_new_latest(path) as pointer:
        _replace_latest(pointer, path.parent)


def publish_checkpoint(temporary: Path, path: Path) -> None:
    """Rename a complete checkpoint to its final name, then make `latest` name it; raises OSError with neither or only the first done.

    The new `latest` is on the disk before the rename, so that a full disk stops both or neither. A broken checkpoint of that name is
    removed first, and before it a `latest` that names it.
    """
    with _write_new_latest(path) as pointer:
        if path.exists():
            if latest_checkpoint(path.parent) == path:
                (path.parent / LATEST).unlink()
            remove_checkpoint(path)
        temporary.rename(path)
        sync_folder(path.parent)
        _replace_latest(pointer, path.parent)


@contextmanager
def _write_new_latest(path: Path) -> Iterator[Path]:
    """Write the new `latest` under a hidden name, and remove that on failure."""
    pointer = hidden_name(path.parent / LATEST, "tmp")
    try:
        write_synced(pointer, f"{path.name}\n".encode())
        yield pointer
    except OSError:
        remove_files(pointer)
        raise


def _replace_latest(pointer: Path, folder: Path) -> None:
    pointer.replace(folder / LATEST)
    sync_folder(folder)
