"""Where ranks of other hosts come to the head: it listens at the addresses by which they reach it, and lets in who holds the ticket."""

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

from ..agent.token import Ticket
from .remote_rank import Remote

LONGEST = 512  # bytes of a line of a stranger's
MEET = 20.0  # seconds that it may take to prove itself
STRANGERS = 4096  # that may stand at the door at once, and then the one that came first is sent away
PAUSE = 0.1  # seconds, where this process may open no more files and no stranger has one of them


class Door:
    """Listens, and has each rank `join` its Remote once both ends have proved that they hold the ticket."""

    def __init__(self, ears: selectors.BaseSelector, came: Callable[[Remote], None]) -> None:
        self._ears, self._came = ears, came
        self._strangers: dict[Stranger, float] = {}
        self._ticket: Ticket | None = None
        self._remotes: dict[int, Remote] = {}
        self._listeners: dict[str, socket.socket] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, addresses: Iterable[str]) -> dict[str, int]:
        """Listen at these addresses of this machine: the port at each. Raises OSError."""
        for address in addresses:
            if address not in self._listeners:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                listener = socket.create_server((address, 0), family=family, backlog=STRANGERS)
                listener.setblocking(False)
                self._listeners[address] = listener
                self._ears.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
        return {address: listener.getsockname()[1] for address, listener in self._listeners.items()}

    def admit(self, ticket: Ticket, remotes: Iterable[Remote]) -> None:
        """Who may come in, and with what ticket."""
        self._ticket = ticket
        self._remotes = {remote.rank: remote for remote in remotes}

    def close(self) -> None:
        """Listen no more; who stands there is sent away."""
        for stranger in list(self._strangers):
            self._send_away(stranger)
        for listener in self._listeners.values():
            with contextlib.suppress(KeyError):
                self._ears.unregister(listener)
            listener.close()
        self._listeners.clear()

    def _accept(self, listener: socket.socket) -> None:
        now = time.monotonic()
        for late in [stranger for stranger, since in self._strangers.items() if now - since > MEET]:
            self._send_away(late)
        if len(self._strangers) >= STRANGERS:
            self._send_away(next(iter(self._strangers)))
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room()
            return
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stranger = Stranger(connection)
        self._strangers[stranger] = now
        self._ears.register(connection, selectors.EVENT_READ, partial(self._hear, stranger))

    def _make_room(self) -> None:
        """One file less is open when this returns; where none is a stranger's, the next try comes a moment later."""
        if self._strangers:
            self._send_away(next(iter(self._strangers)))
        else:
            time.sleep(PAUSE)

    def _hear(self, stranger: Stranger) -> None:
        if stranger not in self._strangers or self._ticket is None:
            return  # sent away while it spoke
        try:
            rank = stranger.hear(self._ticket)
        except (OSError, ValueError):
            rank = -1
        if rank is None:
            return
        remote = self._remotes.get(rank)
        if remote is None or remote.here:
            self._send_away(stranger)
            return
        self._ears.unregister(stranger.connection)
        del self._strangers[stranger]
        remote.join(stranger.connection, stranger.port)
        self._came(remote)

    def _send_away(self, stranger: Stranger) -> None:
        if self._strangers.pop(stranger, None) is not None:
            self._ears.unregister(stranger.connection)
            stranger.connection.close()


class Stranger:
    """A connection until it has proved whose it is."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.port = 0
        self._heard = b""
        self._rank: int | None = None
        self._words: tuple[object, ...] = ()

    def hear(self, ticket: Ticket) -> int | None:
        """Take in some of a line of its; its rank once it has proved it. Raises OSError, and ValueError on any other word."""
        said = self.connection.recv(LONGEST)
        self._heard += said
        if not said or len(self._heard) > LONGEST:
            raise ValueError("no ticket")
        if not self._heard.endswith(b"\n"):
            return None
        line, self._heard = _read(self._heard), b""
        if self._rank is not None:
            match line:
                case {"proof": str(proof)} if compare_digest(proof.encode(), ticket.proof("rank", *self._words).encode()):
                    return self._rank
            raise ValueError("another ticket")
        match line:
            case {"rank": int(rank), "nonce": str(word), "port": int(port)}:
                self._rank, self.port, nonce = rank, port, os.urandom(16).hex()
            case _:
                raise ValueError("no rank")
        self._words = (rank, word, nonce, port)
        self.connection.send(f"{json.dumps({'nonce': nonce, 'proof': ticket.proof('head', rank, word, nonce)})}\n".encode())
        return None


def _read(line: bytes) -> object:
    """What a line says; raises ValueError where it is no JSON, or nested too deep to be looked at."""
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("no line") from None
