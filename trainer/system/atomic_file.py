"""What is written whole or not at all, whoever reads it meanwhile and however full the disk is: a file, a line of one that grows."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path


def put(path: Path, content: bytes) -> None:
    """A file in the place of the one before; raises OSError where it stays as it was."""
    new = path.with_name(f".{path.name}.{os.urandom(6).hex()}")  # a process id may be another's too, on another host or in a container
    try:
        new.write_bytes(content)
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def append(file: int, line: bytes) -> None:
    """A line at the end of a file that is open for appending; raises OSError where nothing was added."""
    end = os.fstat(file).st_size
    if os.write(file, line) < len(line):
        os.ftruncate(file, end)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
