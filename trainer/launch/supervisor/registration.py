"""Where agents on other hosts register with the controller: it listens where the hosts reach it, and admits holders of the join token."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from hmac import compare_digest
from typing import Self

from ..agent.join_token import JoinToken
from .remote_rank import RemoteRank

MAX_LINE = 512  # bytes of a line from a pending connection
PROOF_TIMEOUT = 20.0  # seconds that a connection may take to prove that it holds the token
MAX_PENDING = 4096  # pending connections; one more replaces the oldest
PAUSE = 0.1  # seconds to wait where this process can open no more files and no pending connection can be closed


class Rendezvous:
    """Listens, and registers each rank with its RemoteRank once both ends have proved that they hold the join token."""

    def __init__(self, selector: selectors.BaseSelector, on_registered: Callable[[RemoteRank], None]) -> None:
        self._selector, self._on_registered = selector, on_registered
        self._pending: dict[PendingConnection, float] = {}  # and when they were accepted
        self._token: JoinToken | None = None
        self._ranks: dict[int, RemoteRank] = {}
        self._listeners: dict[str, socket.socket] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def listen(self, addresses: Iterable[str]) -> dict[str, int]:
        """Listen at these addresses of this machine; return the port at each. Raises OSError."""
        for address in addresses:
            if address not in self._listeners:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                listener = socket.create_server((address, 0), family=family, backlog=MAX_PENDING)
                listener.setblocking(False)
                self._listeners[address] = listener
                self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
        return {address: listener.getsockname()[1] for address, listener in self._listeners.items()}

    def admit(self, token: JoinToken, ranks: Iterable[RemoteRank]) -> None:
        """Set the ranks that may register, and the token that they must hold."""
        self._token = token
        self._ranks = {rank.rank: rank for rank in ranks}

    def close(self) -> None:
        """Stop listening and close the pending connections."""
        for connection in list(self._pending):
            self._reject(connection)
        for listener in self._listeners.values():
            with contextlib.suppress(KeyError):
                self._selector.unregister(listener)
            listener.close()
        self._listeners.clear()

    def _accept(self, listener: socket.socket) -> None:
        now = time.monotonic()
        for late in [connection for connection, since in self._pending.items() if now - since > PROOF_TIMEOUT]:
            self._reject(late)
        if len(self._pending) >= MAX_PENDING:
            self._reject(next(iter(self._pending)))
        try:
            accepted, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._close_oldest()
            return
        accepted.setblocking(False)
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = PendingConnection(accepted)
        self._pending[connection] = now
        self._selector.register(accepted, selectors.EVENT_READ, partial(self._read, connection))

    def _close_oldest(self) -> None:
        """Close the oldest pending connection to free a file; if there is none, wait a moment before the next attempt to accept."""
        if self._pending:
            self._reject(next(iter(self._pending)))
        else:
            time.sleep(PAUSE)

    def _read(self, connection: PendingConnection) -> None:
        if connection not in self._pending or self._token is None:
            return  # rejected after the selector reported it
        try:
            number = connection.read(self._token)
        except (OSError, ValueError):
            self._reject(connection)
            return
        if number is None:
            return
        rank = self._ranks.get(number)
        if rank is None or rank.is_registered:
            self._reject(connection)
            return
        self._selector.unregister(connection.socket)
        del self._pending[connection]
        rank.register(connection.socket, connection.port)
        self._on_registered(rank)

    def _reject(self, connection: PendingConnection) -> None:
        if self._pending.pop(connection, None) is not None:
            self._selector.unregister(connection.socket)
            connection.socket.close()


class PendingConnection:
    """A connection that has not yet proved which rank's agent it is (agent/protocol.py lists the messages)."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.port = 0
        self._received = b""
        self._rank: int | None = None
        self._proven: tuple[object, ...] = ()  # what the agent's proof has to cover

    def read(self, token: JoinToken) -> int | None:
        """Read part of a line; return the rank once it is proved. Raises OSError, and ValueError for anything but a registration."""
        data = self.socket.recv(MAX_LINE)
        self._received += data
        if not data or len(self._received) > MAX_LINE:
            raise ValueError("no registration")
        if not self._received.endswith(b"\n"):
            return None
        message, self._received = _json(self._received), b""
        if self._rank is not None:
            match message:
                case {"proof": str(proof)} if compare_digest(proof.encode(), token.proof("agent", *self._proven).encode()):
                    return self._rank
            raise ValueError("a wrong proof")
        match message:
            case {"rank": int(rank), "nonce": str(agent_nonce), "port": int(port)}:
                self._rank, self.port, nonce = rank, port, os.urandom(16).hex()
            case _:
                raise ValueError("no rank")
        self._proven = (rank, agent_nonce, nonce, port)
        answer = {"nonce": nonce, "proof": token.proof("controller", rank, agent_nonce, nonce)}
        self.socket.send(f"{json.dumps(answer)}\n".encode())
        return None


def _json(line: bytes) -> object:
    """Return a line's content; raises ValueError where it is not JSON, or nested too deeply to be read."""
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("no message") from None
