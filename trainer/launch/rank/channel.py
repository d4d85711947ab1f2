"""What a rank says to the process that launched it: one JSON object a line over a control pipe.

    {"say": text}        a line for the user (rank 0's are shown)
    {"status": text}     the live line, which replaces the one before (rank 0's is shown)
    {"beat": step}       the rank is at this step
    {"phase": name}      the rank is at something else than a step, which may take longer: evaluate, save, write, publish, end, at its
                         start hash, read, compare; said again, it gets on
    {"problem": text}    why the rank is about to end, in one line
    {"refused": true}    the problem that follows is with what the user asked for: no fault of the rank
    {"done": true}       the rank has done all that it was asked to do

A run succeeded if every rank said done and exited with 0. What DeepSpeed and torch print goes to the rank's log.
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
from collections.abc import Callable, Mapping
from typing import TextIO

VARIABLE = "DISTRAIN_CONTROL_FD"
BY_HAND = ("say", "problem")  # words that a person reads as they come
PULSE = 1.0  # seconds between two words that a rank gets on
STOPPED = 75  # exit status of a rank that was asked to stop and has saved a checkpoint (sysexits.h: try again later)

Pulse = Callable[[str], None]  # is told what goes on, as often as it does


class Talk:
    """A rank's end of the control pipe; without one (a rank run by hand) its lines and its problem go to `out`, else to stdout."""

    def __init__(self, fd: int | None, out: TextIO | None = None) -> None:
        self._fd = fd
        self._out = out
        self._turn = threading.RLock()  # a signal's handler may speak while its thread does
        self._pulsed = ("", 0.0)  # what it got on with, and when that was said

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Talk:
        """The pipe that the launching process handed over; children of this rank don't inherit it."""
        fd = int(environment.get(VARIABLE) or -1)
        if not _is_pipe(fd):
            return cls(None)
        os.set_inheritable(fd, False)
        return cls(fd)

    def say(self, text: str) -> None:
        """A line, or several, for the user."""
        self._send("say", text)

    def status(self, text: str) -> None:
        """The live line; dropped when nobody reads, so that a stopped terminal never stops a step."""
        self._send("status", text, droppable=True)

    def beat(self, step: int) -> None:
        """This rank is at `step`; dropped when nobody reads."""
        self._send("beat", step, droppable=True)

    def phase(self, name: str) -> None:
        """This rank begins what is no step, and may take longer."""
        self._send("phase", name, droppable=True)

    def pulse(self, name: str) -> None:
        """This rank gets on with what is no step; said once a second at the most, from any thread."""
        now, (before, at) = time.monotonic(), self._pulsed
        if name != before or now >= at + PULSE:
            self._pulsed = (name, now)
            self.phase(name)

    def problem(self, text: str, *, refused: bool = False) -> None:
        """Why this rank is about to end. The run ends with it: the other ranks are told to stop.

        `refused`: what the user asked for can't be done, and the rank is not at fault.
        """
        if refused:
            self._send("refused", True)
        self._send("problem", text)

    def done(self) -> None:
        """All that was asked of this rank is done; exit status 0 has to follow."""
        self._send("done", True)

    def _send(self, word: str, what: str | int, *, droppable: bool = False) -> None:
        if self._fd is None:
            if word in BY_HAND:
                with contextlib.suppress(OSError):  # nobody reads any more
                    print(what, file=self._out or sys.stdout, flush=True)
            return
        line = f"{json.dumps({word: what})}\n".encode()
        with self._turn:
            if not (droppable and _is_full(self._fd)):
                _write(self._fd, line)


def hush(_: str) -> None:
    """Words, and the pulse of work, where nobody is to hear them."""


def _write(fd: int, line: bytes) -> None:
    """One os.write, but for a long line that a signal's handler cut short."""
    with contextlib.suppress(OSError):  # nobody is there any more: the lifeline ends this rank
        while line:
            line = line[os.write(fd, line) :]


def _is_full(fd: int) -> bool:
    watched = select.poll()
    watched.register(fd, select.POLLOUT)
    return not watched.poll(0)


def _is_pipe(fd: int) -> bool:
    """Whether `fd` is open and what a launching process hands over: a pipe or a socket."""
    try:
        mode = os.fstat(fd).st_mode
    except (OSError, OverflowError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
