"""Reads files that a user names: only plain files of a sane size, so that a fifo or device never blocks."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 64 << 20

_KINDS = (
    (stat.S_ISDIR, "it is a folder"),
    (stat.S_ISFIFO, "it is a fifo, not a plain file"),
    (stat.S_ISSOCK, "it is a socket, not a plain file"),
    (stat.S_ISCHR, "it is a device, not a plain file"),
    (stat.S_ISBLK, "it is a device, not a plain file"),
)


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading; raises OSError with the reason as its `strerror` if it is not one."""
    name = os.fsencode(path)
    if b"\0" in name:
        raise OSError(errno.EINVAL, "a path cannot contain NUL", str(path))
    _check_kind(os.stat(name), path)
    file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    opened = os.fdopen(file, "rb")
    try:
        _check_kind(os.fstat(file), path)  # it may have been replaced since
    except OSError:
        opened.close()
        raise
    return opened


def read_plain(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a plain file; raises OSError with the reason as its `strerror` if it is not one or longer than `most`."""
    with open_plain(path) as opened:
        size = os.fstat(opened.fileno()).st_size
        content = opened.read(most + 1) if size <= most else b""
    if max(size, len(content)) > most:
        raise OSError(errno.EFBIG, _too_long(most), str(path))
    return content


def expand_home(path: str | Path) -> Path:
    """Return a path with ~ expanded; unchanged if the user's home is unknown."""
    return Path(os.path.expanduser(path))


def why_unreadable(path: Path) -> str:
    """Return why a file can't be read; "" if it can."""
    try:
        read_plain(path)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _check_kind(found: os.stat_result, path: Path) -> None:
    for is_kind, why in _KINDS:
        if is_kind(found.st_mode):
            raise OSError(errno.EISDIR if is_kind is stat.S_ISDIR else errno.EINVAL, why, str(path))


def _too_long(most: int) -> str:
    size = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most >> 10} KiB"
    return f"it is longer than {size}, the most that is read"
