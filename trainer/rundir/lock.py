"""RUN_DIR/lock: at most one `fit` per run folder, or one rank 0 that no `fit` started. The kernel releases the lock when its holder ends,
however it ends."""

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

LOCK_FILE = "lock"
NO_LOCKS_ERRNOS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)  # of file systems without locks


class RunFolderInUse(Exception):
    """Another process trains in this folder; the message names it, in a line."""


@contextmanager
def hold_run_folder(folder: Path) -> Iterator[str]:
    """Hold RUN_DIR's lock while the block runs; raises RunFolderInUse, and OSError where the file can't be written.

    Yields a warning, or "". The file names its holder, since some file systems do not share locks between hosts; it is empty unless a
    `fit`, or a rank 0 that none started, trains or was killed. Ranks don't inherit the lock of a `fit`: when it is killed, their
    parent-death watch ends them.
    """
    path = folder / LOCK_FILE
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
    """Return who trains in RUN_DIR now, as its lock says; "" if no process does, or if this host can't know.

    A process of this host is looked up by its id first: taking the lock to test it could disturb a `fit` that is just starting.
    """
    try:
        file = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_NONBLOCK)
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
        return ""  # the lock is free: its holder was killed
    finally:
        os.close(file)


def _is_alive(said: str) -> bool:
    """Whether the process that a lock of this host names exists."""
    number = re.match(r"process (\d+) ", said)
    try:
        os.kill(int(number[1]) if number else 0, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
