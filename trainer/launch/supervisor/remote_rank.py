"""A rank on another host, as the head sees it: a socket to its keeper (tether.py)."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

from ..agent.remote_agent import PING, SILENCE
from ..rank.log import Tail
from .rank_handle import CHUNK, Heard


class Remote(Heard):
    """A rank that DeepSpeed's launcher has started, or is to start: until it has come there is no socket."""

    def __init__(self, rank: int, where: str, log: Path) -> None:
        super().__init__(rank, Tail(log), where)
        self.port = 0  # rank 0's: where the ranks meet
        self.orphan = False  # its launcher has died
        self._socket: socket.socket | None = None
        self._heard = time.monotonic()
        self._gone = False  # its end of the socket is closed
        self._cut_at = 0.0
        self._stack: tuple[str, ...] = ()

    @property
    def here(self) -> bool:
        """Whether it has come."""
        return self._socket is not None

    def join(self, connection: socket.socket, port: int) -> None:
        """It has come, and proved that it is who it says."""
        self._socket, self.port = connection, port
        self._heard = self.since = time.monotonic()

    @property
    def address(self) -> str:
        """From where it came."""
        assert self._socket is not None
        return str(self._socket.getpeername()[0])

    @property
    def door(self) -> str:
        """To which address of this machine it came."""
        assert self._socket is not None
        return str(self._socket.getsockname()[0])

    def go(self, address: str, port: int) -> None:
        """Have it started."""
        self.since = time.monotonic()
        self._send(json.dumps({"go": [address, port]}).encode())

    def ping(self) -> None:
        """Show that the head is there; from any thread."""
        self._send(b"ping")

    @property
    def control(self) -> int:
        """The socket's file descriptor."""
        assert self._socket is not None
        return self._socket.fileno()

    def _read(self) -> bytes:
        assert self._socket is not None
        try:
            said = self._socket.recv(CHUNK)
        except BlockingIOError:
            return b""
        except OSError:
            said = b""
        self._gone = not said
        self._heard = time.monotonic() if said else self._heard
        return said

    def is_orphan(self) -> bool:
        """Whether its keeper is gone, or was not heard for so long that it is taken for lost."""
        return self._gone or self.quiet > SILENCE

    @property
    def quiet(self) -> float:
        """Seconds since it was heard."""
        return time.monotonic() - self._heard

    def lose(self) -> None:
        """Nobody says how it ended. On its host it ends by itself: its keeper misses the head, or another process the keeper."""
        if not self._cut or self._heard < self._cut_at - 2 * PING:
            why = "the connection to its keeper broke" if self._gone else f"nothing was heard from its host for {self.quiet:.0f} s"
            self.problem = self.problem or why
            self._fate = "lost" if self._fate == "ended" else self._fate
        self._ends(-signal.SIGKILL, self._fate)

    def tell(self) -> None:
        """Ask it to stop, once: its keeper sends it SIGTERM."""
        if self.end is None and not self._told:
            self._told = True
            self._send(b"stop")

    def dump(self) -> None:
        """Have it write its stacks; they are sent a moment later."""
        self._stack = ()
        self._send(b"stacks")

    def stack(self) -> tuple[str, ...]:
        """What came of it."""
        return self._stack

    def cut(self) -> None:
        """Have it killed, with all that it started."""
        if not self._cut:
            self._cut, self._cut_at = True, time.monotonic()
            self._send(b"kill")

    def abandon(self) -> None:
        """Wait no longer for one that was cut and is still there."""
        self._ends(-signal.SIGKILL, "stuck")

    def close(self, patience: float) -> None:
        """Part from its keeper, which then ends what is left."""
        if self._socket is not None:
            self._socket.close()

    def _note(self, word: str, what: Any) -> None:
        match word, what:
            case "orphan", True:
                self.orphan = True
            case "tail", list():
                self.log = Tail(self.log.path, tuple(map(str, what)))
            case "stack", list():
                self._stack = tuple(map(str, what))
            case _:
                super()._note(word, what)

    def _send(self, word: bytes) -> None:
        """A line; a keeper that takes none is soon taken for lost."""
        if self._socket is not None and not self._gone:
            with contextlib.suppress(OSError):
                self._socket.send(word + b"\n", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
