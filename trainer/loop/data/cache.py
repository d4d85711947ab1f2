"""A folder of arrays that is there or is not: made once by whoever comes first, named by its key, verified when it is opened."""

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

from .data_error import refused

Say = Callable[[str], None]

MANIFEST = "manifest.json"
REMEMBERED = 16 << 20  # bytes of a file from which on its hash is remembered
_BLOCK = 16 << 20  # bytes that one thread hashes at a time
_SETTLED = 2_000_000_000  # nanoseconds after its last change from which on a file's times tell its versions apart


class NotCached(Exception):
    """What was looked for is not in the cache."""


def kept(cache: Path, key: str, make: Callable[[Path], None], say: Say, *, whole: bool) -> Path:
    """The folder of a key, made by `make` where it is missing or damaged; `whole`: hash its files, not only size them.

    One process makes it while the others wait; it appears under its name only when it is complete. Raises Unreadable where
    it cannot be written.
    """
    folder = cache / key
    if _damage(folder, key, whole=whole) is None:
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _alone(cache / f"{key}.lock", say):
            damage = _damage(folder, key, whole=whole)
            if damage is not None:
                if folder.exists():
                    say(f"the cache {folder} is damaged ({damage}): it is made again")
                _replace(folder, key, make)
    except OSError as error:
        raise refused(f"the cache {cache} cannot be written: {error.strerror or error}", "set data.cache=FOLDER to one with room") from None
    return folder


def is_sound(cache: Path, key: str) -> bool:
    """Whether the folder of a key is there, with files of the right sizes."""
    return _damage(cache / key, key, whole=False) is None


def content(path: Path, cache: Path) -> str:
    """A file's hash; that of a large file is remembered beside the cache for as long as the file is not written to."""
    try:
        return remembered_hash(path, cache)
    except NotCached:
        stat = path.stat()
        found = digest(path)
    if time.time_ns() - stat.st_ctime_ns > _SETTLED:
        memory = _memory(path, cache)
        with suppress(OSError):
            memory.parent.mkdir(parents=True, exist_ok=True)
            _write(memory, json.dumps([_version(stat), found]))
    return found


def remembered_hash(path: Path, cache: Path) -> str:
    """The hash of a small file, or that of a large one that is remembered; raises NotCached of any other."""
    stat = path.stat()
    if stat.st_size < REMEMBERED:
        return digest(path)
    try:
        known, found = json.loads(_memory(path, cache).read_text())
    except (OSError, ValueError):
        raise NotCached from None
    if known != _version(stat):
        raise NotCached
    return str(found)


def _version(stat: os.stat_result) -> list[int]:
    """What differs between two versions of a file that was written to."""
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _memory(path: Path, cache: Path) -> Path:
    """Where the hash of a file is remembered."""
    return cache / "hashes" / f"{blake2b(str(path.resolve()).encode(), digest_size=16).hexdigest()}.json"


def digest(path: Path) -> str:
    """blake2b of the blake2b of each block of 16 MiB, which several threads take."""

    def block(at: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(at)
            return blake2b(file.read(_BLOCK), digest_size=32).digest()

    size = path.stat().st_size
    starts = range(0, size, _BLOCK)
    if len(starts) < 2:
        return blake2b(block(0), digest_size=32).hexdigest()
    with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1, 16)) as threads:
        return blake2b(b"".join(threads.map(block, starts)), digest_size=32).hexdigest()


def _damage(folder: Path, key: str, *, whole: bool) -> str | None:
    """What is wrong with a folder, None where nothing is."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files: dict[str, dict[str, Any]] = manifest["files"]
        if manifest["key"] != key:
            return f"{MANIFEST} is of another key"
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


def _replace(folder: Path, key: str, make: Callable[[Path], None]) -> None:
    for left in folder.parent.glob(f"{key}.*.new"):
        shutil.rmtree(left, ignore_errors=True)
    new, old = (folder.with_name(f"{key}.{os.getpid()}.{state}") for state in ("new", "old"))
    new.mkdir()
    try:
        make(new)
        rows = {path.name: {"size": path.stat().st_size, "hash": digest(path)} for path in sorted(new.iterdir())}
        _write(new / MANIFEST, json.dumps({"key": key, "files": rows}, indent=1))
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    finally:
        for path in (new, old):
            shutil.rmtree(path, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    """A file is there whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with open(part, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


@contextmanager
def _alone(path: Path, say: Say) -> Iterator[None]:
    """Only one process is inside at a time; a process that dies leaves."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process prepares the same data: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
