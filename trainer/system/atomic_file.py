"""Atomic writes: a whole file, or a line appended to one, is written completely or not at all, also where the disk is full."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file's content; raises OSError, and then the file is unchanged."""
    new = path.with_name(f".{path.name}.{os.urandom(6).hex()}")  # a process id may be in use on another host or in a container too
    try:
        new.write_bytes(content)
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def append_line(fd: int, line: bytes) -> None:
    """Append a line to a file that is open for appending; raises OSError, and then nothing was appended."""
    end = os.fstat(fd).st_size
    if os.write(fd, line) < len(line):
        os.ftruncate(fd, end)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
