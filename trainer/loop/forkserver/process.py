"""A process that the fork server forked: what it does, what it says over its pipe, and how it ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...launch.rank.log import Log
from ...launch.supervisor.outcome import RankEnd, verdict
from ...system import parent_watch

CHUNK = 1 << 16  # bytes that are read of a pipe at once


@dataclass(kw_only=True)
class Forked:
    """A forked process: its pipe, what came out of it, and its status once it has ended (minus a signal, where one killed it)."""

    pid: int
    pipe: int
    log: Log
    rank: int = 0
    code: int | None = None
    cut: bool = False  # killed from here
    done: bool = False  # it said so
    step: int | None = None  # its last beat
    said: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)  # whole words that it answered a question with
    half: bytes = b""  # a line that hasn't ended yet

    def hear(self) -> list[dict[str, Any]]:
        """What it has said since, a word a line. When its pipe has ended, so has it: its status is noted."""
        heard = os.read(self.pipe, CHUNK)
        if not heard:
            self._reap()
        *lines, self.half = (self.half + heard).split(b"\n")
        words: list[dict[str, Any]] = [json.loads(line) for line in lines]
        for word in words:
            self._note(word)
        return words

    def _note(self, word: dict[str, Any]) -> None:
        match word:
            case {"say": text}:
                self.said.append(text)
            case {"problem": text}:
                self.problems.append(text)
            case {"beat": step}:
                self.step = step
            case {"done": _}:
                self.done = True
            case {"answer": _} | {"failed": _}:
                self.answers.append(word)

    def send(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        if self.code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to it and what it started."""
        if self.code is None:
            self.cut = True
            os.kill(self.pid, signal.SIGKILL)  # by itself, for it may not have got as far as a group of its own
            self._kill_group()

    def end(self) -> None:
        """Nothing of it is left when this returns."""
        if self.code is None:
            self.kill()
            self._reap()

    def _reap(self) -> None:
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._kill_group()
        os.close(self.pipe)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def record(self) -> RankEnd:
        """Its end, once it has ended."""
        assert self.code is not None
        problem = self.problems[0] if self.problems else ""
        return RankEnd(rank=self.rank, code=self.code, log=self.log, done=self.done, step=self.step, problem=problem, cut=self.cut)


def how(ended: Sequence[Forked]) -> str:
    """What ended a job's ranks, in one line, given in the order in which they ended; "" where all is well."""
    return verdict([each.record for each in ended], None).says


def fork(act: Callable[[int], int], log: Path, *, rank: int = 0, closed: Sequence[int] = ()) -> Forked:
    """Fork a process that does `act`, told the pipe that it speaks into, and exits with the status that this returns.

    What it prints goes to `log`. It closes the descriptors `closed`, which are the server's own.
    """
    server, start = os.getpid(), log.stat().st_size if log.exists() else 0
    pipe, speak = os.pipe()
    pid = os.fork()
    if pid == 0:
        for fd in (pipe, *closed):
            os.close(fd)
        _become(lambda: act(speak), log, server)
    os.close(speak)
    return Forked(pid=pid, pipe=pipe, log=Log(log, start), rank=rank)


def _become(act: Callable[[], int], log: Path, server: int) -> None:
    """Be that process, in a session of its own, and end with its status."""
    status = 1
    try:
        os.setsid()
        parent_watch.die_with(server)  # where the kernel can't, the lifeline does it
        written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for fd in (1, 2):
            os.dup2(written, fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        status = act()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
