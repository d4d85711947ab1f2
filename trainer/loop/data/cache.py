"""A cache of folders of arrays, named by key: written atomically by one process, verified when opened."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...system.atomic_file import write_atomically
from .file_hashes import digest
from .files.data_error import data_error
from .hold_lock import hold_lock

Say = Callable[[str], None]

CACHE_MANIFEST = "manifest.json"


def make_cached_folder(cache: Path, key: str, make: Callable[[Path], None], say: Say, *, whole: bool) -> Path:
    """Return the folder of a key; call `make` to fill it if it is missing or damaged. `whole`: verify hashes, not only sizes.

    One process fills it while the others wait; it gets its name only when it is complete. Raises Unreadable if it cannot be
    written.
    """
    folder = cache / key
    if _damage(folder, key, whole=whole) is None:
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with hold_lock(cache / f"{key}.lock", lambda: say("waiting for another process that is preparing the same data")):
            damage = _damage(folder, key, whole=whole)
            if damage is not None:
                if folder.exists():
                    say(f"the cache {folder} is damaged ({damage}): making it again")
                _make_folder(folder, key, make)
    except OSError as error:
        raise data_error(
            f"the cache {cache} cannot be written: {error.strerror or error}", "set data.cache to a folder with free space"
        ) from None
    return folder


def is_sound(cache: Path, key: str) -> bool:
    """Return whether the folder of a key exists, with files of the right sizes."""
    return _damage(cache / key, key, whole=False) is None


def _damage(folder: Path, key: str, *, whole: bool) -> str | None:
    """Return what is wrong with a folder; None if nothing is."""
    try:
        manifest = json.loads((folder / CACHE_MANIFEST).read_text())
        files: dict[str, dict[str, Any]] = manifest["files"]
        if manifest["key"] != key:
            return f"{CACHE_MANIFEST} has another key"
        for name, row in files.items():
            if (folder / name).stat().st_size != row["size"]:
                return f"{name} has another size"
            if whole and digest(folder / name) != row["hash"]:
                return f"{name} has another hash"
    except OSError as error:
        return f"{Path(error.filename or CACHE_MANIFEST).name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{CACHE_MANIFEST} cannot be read"
    return None


def _make_folder(folder: Path, key: str, make: Callable[[Path], None]) -> None:
    for state in ("new", "old"):  # what killed processes have left
        for left in folder.parent.glob(f"{key}.*.{state}"):
            shutil.rmtree(left, ignore_errors=True)
    new, old = (folder.with_name(f"{key}.{os.getpid()}.{state}") for state in ("new", "old"))
    new.mkdir()
    try:
        make(new)
        rows = {path.name: {"size": path.stat().st_size, "hash": digest(path)} for path in sorted(new.iterdir())}
        write_atomically(new / CACHE_MANIFEST, json.dumps({"key": key, "files": rows}, indent=1).encode())
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    finally:
        for path in (new, old):
            shutil.rmtree(path, ignore_errors=True)
