"""Parent-death watch: ends a process when the process that started it dies.

The starting process holds the write end of a pipe. When it dies, by any cause, the pipe ends, and the watching process kills its whole
group. A rank's agent does the same from outside; the rank's own watch is for an agent that is stopped or dead as well.
A process without such a pipe can at least die with its parent (`die_with_parent`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import threading
from collections.abc import Mapping

PARENT_WATCH_VARIABLE = "DISTRAIN_PARENT_WATCH_FD"
PDEATHSIG = 1  # prctl(2)


def watch_parent_from_environment(environment: Mapping[str, str] = os.environ) -> threading.Thread | None:
    """Watch the pipe that this process inherited; return None where there is none (a rank started by hand)."""
    return watch_parent(int(environment[PARENT_WATCH_VARIABLE])) if environment.get(PARENT_WATCH_VARIABLE) else None


def watch_parent(fd: int) -> threading.Thread:
    """Watch `fd` in a daemon thread; when it ends, send SIGKILL to this process group, which includes this process's children."""
    os.set_inheritable(fd, False)
    thread = threading.Thread(target=_kill_group_at_end_of, args=(fd,), name="parent watch", daemon=True)
    thread.start()
    return thread


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies (Linux only). `parent` was its id: exit now if it has died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def _kill_group_at_end_of(fd: int) -> None:
    try:
        while os.read(fd, 512):
            pass
    except OSError as error:
        if error.errno == errno.EBADF:  # closed in this process, which says nothing about the other end
            return
    os.killpg(os.getpgrp(), signal.SIGKILL)
