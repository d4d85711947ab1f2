"""Forks a process of the fork server, reads its messages, and records how it ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ...launch.rank.log import RankLog
from ...launch.supervisor.rank_record import READ_SIZE, Message, RankRecord
from ...system import parent_watch
from ...system.forked_exit import exit_with_status_of


class ForkedProcess(RankRecord):
    """A forked process: the record of its messages and its end, and the pipe that it writes the messages to."""

    def __init__(self, pid: int, pipe: int, log: RankLog, rank: int = 0) -> None:
        super().__init__(rank, log)
        self.pid = pid
        self.pipe = pipe  # closed once the process has ended

    def read_messages(self) -> list[Message]:
        """Read and record its new messages. At the end of the pipe, wait for it and record its end."""
        data = os.read(self.pipe, READ_SIZE)
        if not data:
            self._reap()
        return self.receive(data)

    @property
    def code(self) -> int | None:
        """Its exit status once it has ended, or minus the signal that killed it."""
        return self.outcome.code if self.outcome else None

    def kill(self) -> None:
        """Send SIGKILL to it and to the processes that it started, unless it has ended."""
        if self.outcome is None:
            self.killed = True
            os.kill(self.pid, signal.SIGKILL)  # also directly: it may not have made a group of its own yet
            self._kill_group()

    def kill_and_wait(self) -> None:
        """Kill it and wait until it is gone, unless it has ended."""
        if self.outcome is None:
            self.kill()
            self._reap()

    def _reap(self) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._kill_group()
        os.close(self.pipe)
        self.record_end(code)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def fork(act: Callable[[int], int], log: Path, *, rank: int = 0, close: Sequence[int] = ()) -> ForkedProcess:
    """Fork a process that calls `act` with the file descriptor of its pipe and exits with the status that `act` returns.

    Its stdout and stderr go to `log`. It closes the file descriptors `close`, which are the server's own.
    """
    server, start = os.getpid(), log.stat().st_size if log.exists() else 0
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        for fd in (read_end, *close):
            os.close(fd)
        _run_child(lambda: act(write_end), log, server)
    os.close(write_end)
    return ForkedProcess(pid, read_end, RankLog(log, start), rank)


def _run_child(act: Callable[[], int], log: Path, server: int) -> None:
    """Run `act` in this forked process, in a session of its own, and exit with its status."""

    def run() -> int:
        os.setsid()
        parent_watch.die_with_parent(server)  # on other systems than Linux, the parent-death watch does it
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for fd in (1, 2):
            os.dup2(file, fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return act()

    exit_with_status_of(run)
