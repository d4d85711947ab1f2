"""Processes of a rank whose agent is dead, found by a mark in their environment: no parent or process group leads to them any more."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from uuid import uuid4

from .pipe_agent import is_spared

MARK_VARIABLE = "DISTRAIN_MARK"
PATIENCE = 2.0  # seconds for them to be gone


def new_mark() -> str:
    """Return a value of MARK_VARIABLE that no other rank of any run has."""
    return uuid4().hex


def kill_marked_processes(mark: str) -> bool:
    """Kill the processes that started with this mark in their environment; return whether none is known to be left."""
    deadline = time.monotonic() + PATIENCE
    while (found := _marked_processes(mark)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return not found and Path("/proc/self").exists()


def _marked_processes(mark: str) -> list[int]:
    variable, found = f"{MARK_VARIABLE}={mark}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):  # empty where there is no /proc
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if variable in (process / "environ").read_bytes().split(b"\0") and not is_spared(int(process.name)):
                found.append(int(process.name))
    return found
