"""A rank on another host, as the controller sees it: a socket to its agent (agent/socket_agent.py)."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from pathlib import Path
from typing import Any

from ..agent import protocol
from ..rank.log import RemoteLog
from .rank_handle import RankHandle
from .rank_record import READ_SIZE


class RemoteRank(RankHandle):
    """A rank that DeepSpeed's launcher has started or is to start; it has no socket until it registers."""

    def __init__(self, rank: int, where: str, log: Path) -> None:
        super().__init__(rank, RemoteLog(log), where)
        self.port = 0  # of rank 0: the port that it reserved for the ranks' rendezvous
        self.launcher_died = False
        self._socket: socket.socket | None = None
        self._heard_at = time.monotonic()
        self._closed = False  # the agent's end of the socket is closed
        self._killed_at = 0.0
        self._stack_lines: tuple[str, ...] = ()

    @property
    def is_registered(self) -> bool:
        """Whether its agent has registered."""
        return self._socket is not None

    def register(self, connection: socket.socket, port: int) -> None:
        """Take the connection of its agent, which has proved that it is this rank's."""
        self._socket, self.port = connection, port
        self._heard_at = self.since = time.monotonic()

    @property
    def address(self) -> str:
        """The address from which it connected."""
        assert self._socket is not None
        return str(self._socket.getpeername()[0])

    @property
    def controller_address(self) -> str:
        """The address of this machine to which it connected."""
        assert self._socket is not None
        return str(self._socket.getsockname()[0])

    def start(self, address: str, port: int) -> None:
        """Have its agent start it; the ranks meet at this address and port."""
        self.since = time.monotonic()
        self._send(protocol.start_command(address, port))

    def send_heartbeat(self) -> None:
        """Show its agent that the controller is alive; may be called from any thread."""
        self._send(protocol.HEARTBEAT)

    @property
    def fd(self) -> int:
        """The socket's file descriptor."""
        assert self._socket is not None
        return self._socket.fileno()

    def _read(self) -> bytes:
        assert self._socket is not None
        try:
            data = self._socket.recv(READ_SIZE)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        self._closed = not data
        self._heard_at = time.monotonic() if data else self._heard_at
        return data

    def is_orphan(self) -> bool:
        """Return whether its agent is gone, or has sent nothing for the heartbeat timeout and so counts as lost."""
        return self._closed or self._seconds_silent() > protocol.HEARTBEAT_TIMEOUT

    def _seconds_silent(self) -> float:
        return time.monotonic() - self._heard_at

    def record_lost_agent(self) -> None:
        """Record that it was lost. On its host it ends by itself: its agent misses the controller, or its bootstrap misses the agent."""
        if not self.killed or self._heard_at < self._killed_at - 2 * protocol.HEARTBEAT_INTERVAL:
            silent = f"nothing was heard from its host for {self._seconds_silent():.0f} s"
            self.problem = self.problem or ("the connection to its agent broke" if self._closed else silent)
            self.fate = "lost" if self.fate == "ended" else self.fate
        self.record_end(-signal.SIGKILL)

    def request_stop(self) -> None:
        """Ask it to stop, once: its agent sends it SIGTERM."""
        if self.outcome is None and not self.stop_requested:
            self.stop_requested = True
            self._send(protocol.STOP)

    def dump_stacks(self) -> None:
        """Have it write its stacks; its agent sends them a moment later."""
        self._stack_lines = ()
        self._send(protocol.DUMP_STACKS)

    def stack_lines(self) -> tuple[str, ...]:
        """Return the stacks that its agent has sent."""
        return self._stack_lines

    def kill(self) -> None:
        """Have its agent kill it, with all processes that it started."""
        if not self.killed:
            self.killed, self._killed_at = True, time.monotonic()
            self._send(protocol.KILL)

    def give_up(self) -> None:
        """Record the end of a rank that was killed and is still there."""
        self.fate = "stuck"
        self.record_end(-signal.SIGKILL)

    def close(self, patience: float) -> None:
        """Close the connection; its agent then ends what is left."""
        if self._socket is not None:
            self._socket.close()

    def _record(self, kind: str, content: Any) -> None:
        match kind, content:
            case protocol.LAUNCHER_DIED, True:
                self.launcher_died = True
            case protocol.LOG_TAIL, list():
                self.log = RemoteLog(self.log.path, tuple(map(str, content)))
            case protocol.STACKS, list():
                self._stack_lines = tuple(map(str, content))
            case _:
                super()._record(kind, content)

    def _send(self, line: bytes) -> None:
        """Send a line; an agent that does not take it will soon miss heartbeats and count as lost."""
        if self._socket is not None and not self._closed:
            with contextlib.suppress(OSError):
                self._socket.send(line + b"\n", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
