"""Files that a user names, read whole: only plain files, of a size that can be, so that no fifo or device is waited for."""

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
    """A plain file, open for reading; raises OSError with the reason as its `strerror` where it is none."""
    name = os.fsencode(path)
    if b"\0" in name:
        raise OSError(errno.EINVAL, "a path holds no NUL", str(path))
    _refuse(os.stat(name), path)
    file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    opened = os.fdopen(file, "rb")
    try:
        _refuse(os.fstat(file), path)  # it may have become another since
    except OSError:
        opened.close()
        raise
    return opened


def read_plain(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a plain file; raises OSError with the reason as its `strerror` where it is none, or longer than `most`."""
    with open_plain(path) as opened:
        size = os.fstat(opened.fileno()).st_size
        content = opened.read(most + 1) if size <= most else b""
    if max(size, len(content)) > most:
        raise OSError(errno.EFBIG, _too_long(most), str(path))
    return content


def expanded(path: str | Path) -> Path:
    """A path with ~ as the home folder; as it is where nobody knows the home of its user."""
    return Path(os.path.expanduser(path))


def why_unreadable(path: Path, most: int = MOST_BYTES) -> str:
    """Why a file can't be read, in words; "" where it can."""
    try:
        read_plain(path, most)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _refuse(found: os.stat_result, path: Path) -> None:
    for is_kind, why in _KINDS:
        if is_kind(found.st_mode):
            raise OSError(errno.EISDIR if is_kind is stat.S_ISDIR else errno.EINVAL, why, str(path))


def _too_long(most: int) -> str:
    size = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most >> 10} KiB"
    return f"it is longer than the {size} that are read"
