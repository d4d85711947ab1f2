"""A rank's own hold on its lifeline: when the launching process is gone, the rank ends its whole process group.

The keeper does the same from outside; this is for when the keeper is stopped or dead as well. A process without a lifeline can
at least die with its parent.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import threading
from collections.abc import Mapping

VARIABLE = "DISTRAIN_LIFELINE_FD"
PDEATHSIG = 1  # prctl(2)


def hold_from_environment(environment: Mapping[str, str] = os.environ) -> threading.Thread | None:
    """Hold the lifeline that the launching process handed over; None where there is none (a rank run by hand)."""
    return hold(int(environment[VARIABLE])) if environment.get(VARIABLE) else None


def hold(fd: int) -> threading.Thread:
    """Watch `fd` in a daemon thread; at its end SIGKILL goes to this process group, children of this process included."""
    os.set_inheritable(fd, False)
    thread = threading.Thread(target=_outlive, args=(fd,), name="lifeline", daemon=True)
    thread.start()
    return thread


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, whose id this was; at once where it has died already. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def _outlive(fd: int) -> None:
    try:
        while os.read(fd, 512):
            pass
    except OSError as error:
        if error.errno == errno.EBADF:  # closed in this process: says nothing of the launching one
            return
    os.killpg(os.getpgrp(), signal.SIGKILL)
