"""A cache of folders of arrays, named by key: written atomically by one process, verified when opened."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ...system.cpu import cpu_count
from .files.data_error import data_error

Say = Callable[[str], None]

MANIFEST = "manifest.json"
REMEMBER_FROM = 16 << 20  # bytes: hashes of files of at least this size are remembered
_BLOCK = 16 << 20  # bytes that one thread hashes at a time
_SETTLED = 2_000_000_000  # nanoseconds: if a file was changed more recently, its times do not distinguish its versions


class NotCached(Exception):
    """A key or a hash is not in the cache."""


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
        with _hold_lock(cache / f"{key}.lock", say):
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


def content_hash(path: Path, cache: Path) -> str:
    """Return a file's hash; the hash of a large file is remembered in the cache until the file changes."""
    try:
        return remembered_hash(path, cache)
    except NotCached:
        stat = path.stat()
        found = digest(path)
    if time.time_ns() - stat.st_ctime_ns > _SETTLED:
        memory = _hash_file(path, cache)
        with suppress(OSError):
            memory.parent.mkdir(parents=True, exist_ok=True)
            _write_atomically(memory, json.dumps([_file_version(stat), found]))
    return found


def remembered_hash(path: Path, cache: Path) -> str:
    """Return the hash of a small file, or the remembered hash of a large one; raises NotCached otherwise."""
    stat = path.stat()
    if stat.st_size < REMEMBER_FROM:
        return digest(path)
    try:
        known, found = json.loads(_hash_file(path, cache).read_text())
    except (OSError, ValueError):
        raise NotCached from None
    if known != _file_version(stat):
        raise NotCached
    return str(found)


def _file_version(stat: os.stat_result) -> list[int]:
    """Return what differs between two versions of a file: size, times, inode."""
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _hash_file(path: Path, cache: Path) -> Path:
    """Return the path at which a file's hash is remembered."""
    return cache / "hashes" / f"{blake2b(str(path.resolve()).encode(), digest_size=16).hexdigest()}.json"


def digest(path: Path) -> str:
    """Return the blake2b of the blake2b of each 16 MiB block; several threads hash blocks."""

    def block(at: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(at)
            return blake2b(file.read(_BLOCK), digest_size=32).digest()

    size = path.stat().st_size
    starts = range(0, size, _BLOCK)
    if len(starts) < 2:
        return blake2b(block(0), digest_size=32).hexdigest()
    with ThreadPoolExecutor(min(len(starts), cpu_count(), 16)) as threads:
        return blake2b(b"".join(threads.map(block, starts)), digest_size=32).hexdigest()


def _damage(folder: Path, key: str, *, whole: bool) -> str | None:
    """Return what is wrong with a folder; None if nothing is."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files: dict[str, dict[str, Any]] = manifest["files"]
        if manifest["key"] != key:
            return f"{MANIFEST} has another key"
        for name, row in files.items():
            if (folder / name).stat().st_size != row["size"]:
                return f"{name} has another size"
            if whole and digest(folder / name) != row["hash"]:
                return f"{name} has another hash"
    except OSError as error:
        return f"{Path(error.filename or MANIFEST).name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return None


def _make_folder(folder: Path, key: str, make: Callable[[Path], None]) -> None:
    for left in folder.parent.glob(f"{key}.*.new"):
        shutil.rmtree(left, ignore_errors=True)
    new, old = (folder.with_name(f"{key}.{os.getpid()}.{state}") for state in ("new", "old"))
    new.mkdir()
    try:
        make(new)
        rows = {path.name: {"size": path.stat().st_size, "hash": digest(path)} for path in sorted(new.iterdir())}
        _write_atomically(new / MANIFEST, json.dumps({"key": key, "files": rows}, indent=1))
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    finally:
        for path in (new, old):
            shutil.rmtree(path, ignore_errors=True)


def _write_atomically(path: Path, text: str) -> None:
    """Write a file atomically."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with open(part, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


@contextmanager
def _hold_lock(path: Path, say: Say) -> Iterator[None]:
    """Hold the lock `path`, which one process has at a time; the kernel releases the lock of a process that dies."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that is preparing the same data")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
