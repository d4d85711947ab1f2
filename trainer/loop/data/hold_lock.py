"""A lock that one process of a host has at a time, and the others wait for."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hold_lock(path: Path, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock `path` while the block runs; the kernel releases the lock of a process that dies. `waits` is called where another
    process has it. Raises OSError where the file can't be opened."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
