"""Hashes of the contents of data files, remembered in the cache until a file changes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ...system.atomic_file import write_atomically
from ...system.cpu import cpu_count
from .hold_lock import hold_lock

REMEMBERED_ALONE = 16 << 20  # bytes: the hash of a file of at least this size has a memory of its own, whatever files are read with it
_SMALL_FILES = 64 << 20  # bytes that are hashed where only quick work is allowed
_BLOCK = 16 << 20  # bytes that one thread hashes at a time
_SETTLED = 2_000_000_000  # nanoseconds: if a file was changed more recently, its times do not distinguish its versions


class NotCached(Exception):
    """A key or a hash is not in the cache, and to make it would take long."""


class _HashMemory:
    """The remembered hashes of a group of files, in one file of the cache; files are named by absolute path."""

    def __init__(self, names: Sequence[str], cache: Path) -> None:
        group = "\n".join(names)
        self.path = cache / "hashes" / f"{blake2b(group.encode(), digest_size=16).hexdigest()}.json"
        self.known: dict[str, Any] = {}  # [version, hash] by name
        self.is_changed = False
        self.read()

    def read(self) -> None:
        """Read what is remembered."""
        with suppress(OSError, ValueError, TypeError):
            self.known = dict(json.loads(self.path.read_text()))

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other processes that share the cache from hashing the same files, such as the other ranks of a host; they wait. A cache that
        can't be written keeps none."""
        with ExitStack() as held:
            with suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(hold_lock(self.path.with_suffix(".lock")))
            yield

    def find(self, name: str, stat: os.stat_result) -> str | None:
        """Return the remembered hash of a file; None if there is none of the version that `stat` is of."""
        version, found = self.known.get(name, (None, None))
        return str(found) if version == _file_version(stat) else None

    def compute(self, name: str, path: Path) -> str:
        """Return the hash of a file, and remember it if the file has not just been changed."""
        stat = path.stat()
        has_settled = _has_settled(stat)  # before it is hashed, which takes longer than that if it is large
        found = digest(path)
        if has_settled:
            self.known[name] = [_file_version(stat), found]
            self.is_changed = True
        return found

    def save(self) -> None:
        """Write what is new; a cache that can't be written remembers nothing."""
        if self.is_changed:
            with suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.path, json.dumps(self.known).encode())


def file_hashes(paths: Sequence[Path], cache: Path, report: Callable[[int], None], *, only_quick: bool = False) -> list[str]:
    """Return the hash of each file's contents, and call `report` with the bytes of each file that is done.

    With `only_quick` it raises NotCached where it would have to read a large file, or many small ones.
    """
    names = [os.path.abspath(path) for path in paths]
    stats = [os.stat(path) for path in paths]
    small = [name for name, stat in zip(names, stats, strict=True) if stat.st_size < REMEMBERED_ALONE]
    together, hashes, read = _HashMemory(small, cache), list[str](), 0
    for path, name, stat in zip(paths, names, stats, strict=True):
        size = stat.st_size
        memory = together if size < REMEMBERED_ALONE else _HashMemory([name], cache)
        found = memory.find(name, stat)
        if found is None:
            read += size
            if only_quick and (memory is not together or read > _SMALL_FILES):
                raise NotCached
            if memory is together:
                found = memory.compute(name, path)
            else:
                with memory.hold() if _has_settled(stat) else nullcontext():
                    memory.read()
                    found = memory.find(name, stat) or memory.compute(name, path)
                    memory.save()
        hashes.append(found)
        report(size)
    together.save()
    return hashes


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


def _has_settled(stat: os.stat_result) -> bool:
    """Whether a file's times distinguish the version that `stat` is of from all later ones, so that its hash can be remembered."""
    return time.time_ns() - stat.st_ctime_ns > _SETTLED


def _file_version(stat: os.stat_result) -> list[int]:
    """Return what differs between two versions of a file: size, times, inode."""
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
