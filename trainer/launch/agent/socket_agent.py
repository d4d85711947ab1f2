"""The agent of a rank on a host: it does what pipe_agent.py does, controlled over a socket (protocol.py) instead of a pipe.

The controller sends heartbeats. When they stop for HEARTBEAT_TIMEOUT, as they do when the controller's machine dies or a link is cut, the
agent kills the rank and all processes that it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...system import parent_watch
from ..commands.mpirun_environment import launcher_variables
from ..rank import channel
from ..rank.environment import RankEnvironment
from ..rank.log import SEARCHED_LINES, RankLog, open_rank_log
from . import orphans, pipe_agent, protocol
from .join_token import JOIN_TOKEN_FILE, JoinToken

STACKS_WAIT = 1.0  # seconds for stacks to be written
LAUNCHER_WAIT = 5.0  # seconds for the launcher to end by itself once its children have
MAX_UNSENT = 1 << 20  # bytes that wait to be sent; with more, the rank's messages are not read
READ_SIZE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """The number of a rank in the run and on its host, and the run's folder."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    host: int
    folder: Path


def run_agent(
    token: JoinToken, config: AgentConfig, controller: socket.socket, bootstrap: socket.socket, watched: Sequence[int], mark: str
) -> None:
    """Run the rank to its end, then exit; `watched` are pidfds of the bootstrap and of its launcher, which are ended afterwards."""
    log, file = open_rank_log(config.folder / "ranks", config.rank, config.ranks)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for each in (1, 2):
        os.dup2(file.fileno(), each)
    RemoteAgent(token, config, controller, bootstrap, log, mark).run()
    for each in watched:
        _end_process(each)
    _remove_token(token, config.folder / JOIN_TOKEN_FILE)
    os._exit(0)


class RemoteAgent:
    """The agent's state: its connections, the rank once it has been started, and what waits to be sent."""

    def __init__(
        self, token: JoinToken, config: AgentConfig, controller: socket.socket, bootstrap: socket.socket, log: RankLog, mark: str
    ) -> None:
        self._token, self._config, self._log, self._mark = token, config, log, mark
        self._controller, self._bootstrap = controller, bootstrap
        controller.setblocking(False)
        self._wakeup = pipe_agent.become_reaper()
        self._rank: int | None = None  # its process id
        self._early_signals: list[int] = []  # for a rank that has not been started
        self._control = -1  # the pipe from which the rank's messages are read
        self._unsent = b""
        self._partial_command = b""  # of the controller
        self._partial_message = b""  # of the rank
        self._heard_at = time.monotonic()  # when the controller last sent something
        self._ending = False  # the rank is to be killed
        self._controller_gone = False
        self._stacks: tuple[float, RankLog] | None = None  # when stacks are sent, and from where in the log

    def run(self) -> None:
        """Start the rank at the controller's command. Return when none of its processes is left and the controller is informed or gone."""
        status: int | None = None
        while not self._ending and status is None:
            self._poll()
            status = pipe_agent.reap(self._rank) if self._rank is not None else None
        if self._rank is not None:
            code = pipe_agent.end_rank(self._rank, status)
            self._relay_rest()
            if code not in (0, channel.STOPPED):
                self._send_message(protocol.LOG_TAIL, self._log.last_lines(SEARCHED_LINES))
            self._send_message(protocol.ENDED, code)
        with contextlib.suppress(OSError):
            self._bootstrap.send(protocol.RANK_ENDED, socket.MSG_DONTWAIT)
        while not self._controller_gone:
            self._poll()

    def _poll(self) -> None:
        """Wait half a heartbeat interval at most, and handle what has arrived."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        if self._bootstrap.fileno() >= 0:
            poll.register(self._bootstrap, select.POLLIN)
        if not self._controller_gone:
            poll.register(self._controller, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        if self._control >= 0 and len(self._unsent) < MAX_UNSENT:
            poll.register(self._control, select.POLLIN)
        readable = {fd for fd, _ in poll.poll(1000 * protocol.HEARTBEAT_INTERVAL / 2)}
        if self._wakeup in readable:
            os.read(self._wakeup, 512)
        if self._control in readable:
            self._relay()
        if self._bootstrap.fileno() in readable:
            self._read_bootstrap()
        self._send_stacks()
        if not self._controller_gone:
            self._flush()
            self._read_controller()
        with contextlib.suppress(OSError):
            self._bootstrap.send(protocol.AGENT_ALIVE, socket.MSG_DONTWAIT)

    def _read_controller(self) -> None:
        try:
            data = self._controller.recv(READ_SIZE)
            self._heard_at = time.monotonic()
        except BlockingIOError:
            data = b"\n" if time.monotonic() - self._heard_at < protocol.HEARTBEAT_TIMEOUT else b""
        except OSError:
            data = b""
        if not data:
            self._ending = self._controller_gone = True
            return
        *lines, self._partial_command = (self._partial_command + data).split(b"\n")
        for line in lines:
            self._obey(line)

    def _obey(self, line: bytes) -> None:
        match line:
            case protocol.HEARTBEAT:
                self._send_message(protocol.ALIVE, True)
            case protocol.STOP:
                self._signal_rank(signal.SIGTERM)
            case protocol.DUMP_STACKS:
                self._stacks = (time.monotonic() + STACKS_WAIT, self._log.from_here())
                self._signal_rank(signal.SIGUSR2)
                self._signal_rank(signal.SIGURG)
            case protocol.KILL:
                self._ending = True
            case _ if self._rank is None and (address := protocol.start_address(line)):
                self._start_rank(*address)

    def _signal_rank(self, number: int) -> None:
        if self._rank is None:
            self._early_signals.append(number)
        else:
            pipe_agent.send_signal(self._rank, number)

    def _start_rank(self, address: str, port: int) -> None:
        """Start the rank, with a pipe for its messages and one that ends when this process does."""
        config = self._config
        self._control, write_end = os.pipe()
        watched, self._held = os.pipe()
        for each in (write_end, watched):
            os.set_inheritable(each, True)
        environment = RankEnvironment(
            rank=config.rank,
            ranks=config.ranks,
            local_rank=config.local_rank,
            local_ranks=config.local_ranks,
            address=address,
            port=port,
        )
        for name in launcher_variables(os.environ):
            del os.environ[name]
        os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"
        pipes = {
            parent_watch.PARENT_WATCH_VARIABLE: str(watched),
            channel.CHANNEL_VARIABLE: str(write_end),
            orphans.MARK_VARIABLE: self._mark,
        }
        os.environ.update({**environment.variables({**os.environ, **self._token.environment}), **pipes})
        self._rank = pipe_agent.start_rank(list(self._token.command))
        for number in self._early_signals:
            pipe_agent.send_signal(self._rank, number)
        os.close(write_end)
        os.close(watched)

    def _relay(self) -> None:
        """Pass whole lines of the rank on to the controller, so that they do not mix with this agent's own."""
        *lines, self._partial_message = (self._partial_message + os.read(self._control, READ_SIZE)).split(b"\n")
        self._unsent += b"".join(line + b"\n" for line in lines)

    def _relay_rest(self) -> None:
        """Pass on what the rank had written when it ended."""
        os.set_blocking(self._control, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._control, READ_SIZE):
                self._partial_message += data
        self._unsent += self._partial_message + b"\n"
        os.close(self._control)
        self._control = -1

    def _read_bootstrap(self) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = self._bootstrap.recv(64)
        if protocol.BOOTSTRAP_STOP in data:
            self._signal_rank(signal.SIGTERM)
        if not data or protocol.BOOTSTRAP_ORPHANED in data:
            self._send_message(protocol.LAUNCHER_DIED, True)
        if not data:
            self._bootstrap.close()

    def _send_stacks(self) -> None:
        if self._stacks is not None and time.monotonic() >= self._stacks[0]:
            self._send_message(protocol.STACKS, self._stacks[1].last_lines(SEARCHED_LINES))
            self._stacks = None

    def _send_message(self, kind: str, content: object) -> None:
        self._unsent += f"{json.dumps({kind: content})}\n".encode()

    def _flush(self) -> None:
        try:
            self._unsent = self._unsent[self._controller.send(self._unsent) :] if self._unsent else b""
        except BlockingIOError:
            return
        except OSError:
            self._ending = self._controller_gone = True


def _remove_token(token: JoinToken, file: Path) -> None:
    """Remove the join token's file, unless it holds another attempt's token by now."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        if JoinToken.read(file) == token:
            file.unlink()


def _end_process(pidfd: int) -> None:
    """Wait LAUNCHER_WAIT for a process to end by itself, then kill it."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(1000 * LAUNCHER_WAIT):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
