"""Atomic writes: a whole file, or a line appended to one, is written completely or not at all, also where the disk is full."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file's content; raises OSError, and then the file is unchanged."""
    write_together({path: content})


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Replace the contents of several files, once all are on the disk; raises OSError, and on a full disk then all are unchanged."""
    new = {path: _hidden_name(path) for path in contents}
    try:
        for path, content in contents.items():
            with new[path].open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # otherwise a power loss may leave the new name with no content
        for path, hidden in new.items():
            hidden.replace(path)
    except OSError:
        for hidden in new.values():
            with suppress(OSError):
                hidden.unlink(missing_ok=True)
        raise


def _hidden_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.urandom(6).hex()}")  # a process id may be in use on another host or in a container too


def append_line(fd: int, line: bytes) -> None:
    """Append a line to a file that is open for appending; raises OSError, and then nothing was appended."""
    end = os.fstat(fd).st_size
    if os.write(fd, line) < len(line):
        os.ftruncate(fd, end)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
