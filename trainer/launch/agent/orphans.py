"""Processes of a rank whose keeper is dead, found by a mark in their environment: no parent or group names them any more."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from uuid import uuid4

from .local_agent import spared

VARIABLE = "DISTRAIN_MARK"
PATIENCE = 2.0  # seconds for them to be gone


def new_mark() -> str:
    """A value of the variable that no other rank has, of this run or any."""
    return uuid4().hex


def kill(mark: str) -> bool:
    """SIGKILL to all processes whose environment was given this mark, until none is left; whether that is known."""
    until = time.monotonic() + PATIENCE
    while (found := _marked(mark)) and time.monotonic() < until:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return not found and Path("/proc/self").exists()


def _marked(mark: str) -> list[int]:
    wanted, found = f"{VARIABLE}={mark}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):  # empty where there is no /proc
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if wanted in (process / "environ").read_bytes().split(b"\0") and not spared(int(process.name)):
                found.append(int(process.name))
    return found
