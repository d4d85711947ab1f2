"""One `fit` a run folder: RUN_DIR/lock, which the kernel frees when its holder has ended, however that was."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE = "lock"
NO_LOCKS_ERRNOS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)  # of file systems that lock no files


class RunFolderInUse(Exception):
    """Another `fit` is at work in this folder; the words say which, in a line."""


@contextmanager
def hold_run_folder(folder: Path) -> Iterator[str]:
    """Hold RUN_DIR as long as the block runs; raises Taken, and OSError where the file can't be written.

    Yields a warning, or "". The file says who holds it, for where a file system keeps locks to each host: it is empty when no
    `fit` is at work or killed. The ranks don't inherit it; those of a holder that was killed die by their lifelines.
    """
    path = folder / FILE
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderInUse(
                f"{_holder(file) or 'another process'} trains in {folder}: stop it, or set name= to train another run"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS_ERRNOS:
                raise
        before, here = _holder(file), socket.gethostname()
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {here}, since {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n".encode(), 0)
        elsewhere = before and f" on {here}," not in before
        yield f"{path} was left by {before}: if that still runs, stop one of the two" if elsewhere else ""
        os.ftruncate(file, 0)
    finally:
        os.close(file)


def _holder(file: int) -> str:
    return os.pread(file, 1000, 0).decode(errors="replace").strip()


def lock_holder(folder: Path) -> str:
    """Who trains in RUN_DIR now, as its lock says; "" where nobody does, or where that can't be told here.

    A process of this host is looked for by its number first, so that looking disturbs no `fit` that is about to start.
    """
    try:
        file = os.open(folder / FILE, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        said = _holder(file)
        if not said or (f" on {socket.gethostname()}," in said and not _is_alive(said)):
            return ""
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return said
    except OSError as error:
        return said if error.errno in NO_LOCKS_ERRNOS else ""
    else:
        return ""  # freed: its holder was killed
    finally:
        os.close(file)


def _is_alive(said: str) -> bool:
    """Whether the process that a lock of this host names is there."""
    number = re.match(r"process (\d+) ", said)
    try:
        os.kill(int(number[1]) if number else 0, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
