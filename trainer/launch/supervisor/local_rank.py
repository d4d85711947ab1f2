"""A rank on this machine: its agent process, and the pipes to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from ...system import parent_watch
from ..agent import orphans
from ..agent.pipe_agent import block_signals
from ..rank import channel
from ..rank.environment import RankEnvironment
from ..rank.log import RankLog, open_rank_log
from .rank_handle import RankHandle
from .rank_record import READ_SIZE

AGENT = Path(__file__).parents[1] / "agent" / "pipe_agent.py"
CHECK_INTERVAL = 0.5  # seconds between two checks whether an agent is stopped
STOPPED_FOR = 2.0  # seconds after which a stopped agent is continued


class LocalRank(RankHandle):
    """A rank that was started here, or another process under an agent."""

    log: RankLog

    def __init__(
        self, rank: int, agent: subprocess.Popen[bytes], control: int, held: int, log: RankLog, mark: str, where: str = ""
    ) -> None:
        super().__init__(rank, log, where)
        self._agent = agent
        self._control = control  # the pipe from which its messages are read
        self._held: int | None = held  # the write end of the parent-death pipe; once it is closed, the agent kills the rank
        self._mark = mark
        self._stacks: RankLog | None = None  # the log from where the stacks begin
        self._checked_at = 0.0
        self._stopped_since: float | None = None  # since when the agent is stopped

    @property
    def fd(self) -> int:
        """The pipe from which its messages are read."""
        return self._control

    def _read(self) -> bytes:
        try:
            return os.read(self._control, READ_SIZE)
        except BlockingIOError:
            return b""

    def wake_agent(self) -> str:
        """Continue an agent that was stopped: until then it can neither report the rank's end nor end it."""
        now = time.monotonic()
        if now < self._checked_at + CHECK_INTERVAL:
            return ""
        self._checked_at = now
        if not _is_stopped(self._agent.pid):
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now >= self._stopped_since + STOPPED_FOR:
            self._agent.send_signal(signal.SIGCONT)
            return f"the agent of rank {self.rank} was stopped for {now - self._stopped_since:.0f} s; it continues"
        return ""

    def is_orphan(self) -> bool:
        """Return whether its agent has exited; earlier messages may be unread."""
        return self._agent.poll() is not None

    def record_lost_agent(self) -> None:
        """Record that its agent died before it could report the rank's end. The rank dies with it; its processes are killed here."""
        orphans.kill_marked_processes(self._mark)
        self.fate = "agent died"
        self.record_end(self._agent.returncode)

    def request_stop(self) -> None:
        """Ask it to stop, once: its agent forwards the SIGTERM."""
        if self.outcome is None and not self.stop_requested:
            self.stop_requested = True
            self._agent.send_signal(signal.SIGTERM)

    def dump_stacks(self) -> None:
        """Have it write its stacks and report its collectives: its agent forwards both signals."""
        if self.outcome is None:
            self._stacks = self.log.from_here()
            self._agent.send_signal(signal.SIGUSR2)
            self._agent.send_signal(signal.SIGURG)

    def stack_lines(self) -> tuple[str, ...]:
        """Return what its log has received since."""
        return self._stacks.last_lines(1000) if self._stacks else ()

    def kill(self) -> None:
        """Have its agent kill it, with all processes that it started."""
        self.killed = True
        if self._held is not None:
            os.close(self._held)
            self._held = None
            self._agent.send_signal(signal.SIGCONT)  # a stopped agent would not notice

    def give_up(self) -> None:
        """Record the end of a rank that was killed and whose agent still lives; if no process is left, read its end from its messages."""
        self._agent.kill()
        if not orphans.kill_marked_processes(self._mark):
            self.fate = "stuck"
        self.record_end(0 if self.done and self.fate != "stuck" else -signal.SIGKILL)

    def close(self, patience: float) -> None:
        """End it: no process of it is left afterwards, except those that SIGKILL does not end in `patience` seconds."""
        self.kill()
        try:
            self._agent.wait(patience)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            orphans.kill_marked_processes(self._mark)
            with suppress(subprocess.TimeoutExpired):
                self._agent.wait(orphans.PATIENCE)
        os.close(self._control)


def start_local_rank(
    command: Sequence[str], rank_environment: RankEnvironment, logs: Path, environment: Mapping[str, str], where: str = ""
) -> LocalRank:
    """Start one rank under its agent; raises OSError where this machine can't."""
    log, file = open_rank_log(logs, rank_environment.rank, rank_environment.ranks)
    return start_under_agent(command, rank_environment.rank, log, file, rank_environment.variables(environment), where=where)


def start_under_agent(
    command: Sequence[str],
    rank: int,
    log: RankLog,
    file: IO[bytes],
    environment: Mapping[str, str],
    *,
    folder: Path | None = None,
    where: str = "",
) -> LocalRank:
    """Start any command under an agent, with its output in `file`, which is closed here; raises OSError."""
    watched, held = os.pipe()
    control, write_end = os.pipe()
    os.set_blocking(control, False)
    mark = orphans.new_mark()
    pipes = {parent_watch.PARENT_WATCH_VARIABLE: str(watched), channel.CHANNEL_VARIABLE: str(write_end), orphans.MARK_VARIABLE: mark}
    try:
        with block_signals():
            agent = subprocess.Popen(
                [sys.executable, "-I", "-S", str(AGENT), str(watched), str(write_end), *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**environment, **pipes},
                cwd=folder,
                pass_fds=(watched, write_end),
                start_new_session=True,
            )
    except OSError:
        os.close(control)
        os.close(held)
        raise
    finally:
        os.close(watched)
        os.close(write_end)
        file.close()
    return LocalRank(rank, agent, control, held, log, mark, where)


def _is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process; False where there is no /proc (proc(5): the state follows the name in brackets)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False
