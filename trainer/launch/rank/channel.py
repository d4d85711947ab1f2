"""Messages from a rank to the controller, which supervises it: one JSON object a line over a pipe.

    {"say": text}        a line for the user (shown for rank 0)
    {"status": text}     the live line, which replaces the previous one (shown for rank 0)
    {"step": step}       the rank begins this step
    {"phase": name}      the rank does something other than a step, which may take longer: evaluate, save, write, publish, end; at its
                         start hash, read, compare, sinks; check (of the devices). Sent again, it reports progress.
    {"collectives": [...]}  when it is asked about a hang: its newest collectives in each group (rank/group_record.py)
    {"checked": steps}   a check of all devices after so many steps of the run found no fault
    {"problem": text}    why the rank is about to end, in one line
    {"fault": name}      the problem that follows is a fault of this rank's device ("device"), or of a machine, perhaps another ("machine")
    {"refused": true}    the problem that follows is an error of the user's, not a fault of the rank
    {"done": true}       the rank has finished its work

A run succeeded if every rank sent `done` and exited with 0. What DeepSpeed and torch print goes to the rank's log.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Self, TextIO

CHANNEL_VARIABLE = "DISTRAIN_CONTROL_FD"
PRINTED = ("say", "problem")  # messages that are printed where there is no pipe
PROGRESS_INTERVAL = 1.0  # least seconds between two progress messages of one phase
STOPPED = 75  # exit status of a rank that was asked to stop and has saved what it had (sysexits.h: EX_TEMPFAIL, try again later)
STOPPED_UNSAVED = 143  # exit status after a stop request whose checkpoint could not be saved: 128 + SIGTERM

Fault = Literal["", "device", "machine"]

OnProgress = Callable[[str], None]  # called with the phase, as often as there is progress


class Channel:
    """A rank's end of the pipe. Without a pipe (a rank started by hand) PRINTED messages go to `out`, or else to stdout."""

    def __init__(self, fd: int | None, out: TextIO | None = None) -> None:
        self._fd = fd
        self._out = out
        self._lock = threading.RLock()  # reentrant: a signal handler may send while its own thread does
        self._last_progress = ("", 0.0)  # (phase, time)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Return the channel that this rank inherited; this rank's children do not inherit it."""
        fd = int(environment.get(CHANNEL_VARIABLE) or -1)
        if not _is_pipe(fd):
            return cls(None)
        os.set_inheritable(fd, False)
        return cls(fd)

    def say(self, text: str) -> None:
        """Send one or more lines for the user."""
        self._send("say", text)

    def report_status(self, text: str) -> None:
        """Send the live line. It is dropped while the pipe is full, so that a stopped terminal never blocks a step."""
        self._send("status", text, droppable=True)

    def report_step(self, step: int) -> None:
        """Report that this rank begins `step`; dropped while the pipe is full."""
        self._send("step", step, droppable=True)

    def report_phase(self, name: str) -> None:
        """Report that this rank begins something other than a step, which may take longer."""
        self._send("phase", name, droppable=True)

    def report_progress(self, name: str) -> None:
        """Report progress in a phase, at most every PROGRESS_INTERVAL seconds; may be called from any thread."""
        now, (phase, at) = time.monotonic(), self._last_progress
        if name != phase or now >= at + PROGRESS_INTERVAL:
            self._last_progress = (name, now)
            self.report_phase(name)

    def report_checked(self, steps: int) -> None:
        """Report that a check of all devices, after so many steps of the run, found no fault."""
        self._send("checked", steps)

    def report_collectives(self, records: Sequence[object]) -> None:
        """Report this rank's newest collectives, as plain data of group_record.py; dropped while the pipe is full."""
        self._send("collectives", records, droppable=True)

    def report_problem(self, text: str, *, refused: bool = False, fault: Fault = "") -> None:
        """Report why this rank is about to end. This ends the run: the other ranks are asked to stop.

        `refused`: the user asked for something that can't be done, and the rank is not at fault. `fault`: a device or a machine is.
        """
        if fault:
            self._send("fault", fault)
        if refused:
            self._send("refused", True)
        self._send("problem", text)

    def report_done(self) -> None:
        """Report that this rank has finished its work; exit status 0 must follow."""
        self._send("done", True)

    def _send(self, kind: str, content: str | int | Sequence[object], *, droppable: bool = False) -> None:
        if self._fd is None:
            if kind in PRINTED:
                with contextlib.suppress(OSError):  # the reader is gone
                    print(content, file=self._out or sys.stdout, flush=True)
            return
        line = f"{json.dumps({kind: content})}\n".encode()
        with self._lock:
            if not (droppable and _is_full(self._fd)):
                _write(self._fd, line)


def ignore_text(_: str) -> None:
    """Ignore a line or a progress report."""


def _write(fd: int, line: bytes) -> None:
    """Write a line: one os.write, except for a long line that a signal handler interrupts."""
    with contextlib.suppress(OSError):  # the controller is gone: the parent-death watch ends this rank
        while line:
            line = line[os.write(fd, line) :]


def _is_full(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return not poll.poll(0)


def _is_pipe(fd: int) -> bool:
    """Return whether `fd` is open and a pipe or a socket, as a channel is."""
    try:
        mode = os.fstat(fd).st_mode
    except (OSError, OverflowError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
