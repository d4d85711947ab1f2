"""A rank's keeper on a host: what local_agent.py does, at the end of a socket to the head, which is its lifeline.

The head pings every second and is answered. Where it is silent for SILENCE seconds, as it is when it died with its machine
or when a link is cut, the rank and all that it started die. Its other words, a line each:

    {"go": [address, port]}   all ranks are there: start this one, they meet at that place
    stop                      SIGTERM to the rank, once more
    stacks                    the rank writes the Python stacks of its threads to its log, from where they are sent
    kill                      end the rank
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
from ..commands import openmpi
from ..rank import channel
from ..rank.environment import Place
from ..rank.log import Log, open_log
from ..supervisor.outcome import LOOKED_AT
from . import local_agent, orphans
from .token import NAME, Ticket

PING = 1.0  # seconds between two words of the head
SILENCE = 8.0  # seconds without one: it is gone, or cut off
STACKS = 1.0  # seconds for stacks to be written
LEAVE = 5.0  # seconds for the launcher to end by itself once its children have
MOST = 1 << 20  # bytes that wait for the head before a rank's words have to
CHUNK = 1 << 16
TICK, ENDED = b".", b"!"  # to the launcher's child: the keeper is well; its rank has ended
STOP, ORPHAN = b"T", b"O"  # from it: SIGTERM came; the launcher has died


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank's place in the run and on its host, and the run's folder."""

    rank: int
    ranks: int
    local: int
    locals: int
    host: int
    folder: Path


def tethered(ticket: Ticket, seat: Seat, head: socket.socket, stub: socket.socket, watched: Sequence[int], mark: str) -> None:
    """Keep the rank to its end; `watched` are pidfds of the launcher's child and of the launcher, which end with it."""
    log, file = open_log(seat.folder / "ranks", seat.rank, seat.ranks)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for each in (1, 2):
        os.dup2(file.fileno(), each)
    tether = Tether(ticket, seat, head, stub, log, mark)
    tether.keep()
    for each in watched:
        _end(each)
    _drop(ticket, seat.folder / NAME)
    os._exit(0)


class Tether:
    """The keeper's state: the rank once it has been started, what waits to be sent, when the head was heard."""

    def __init__(self, ticket: Ticket, seat: Seat, head: socket.socket, stub: socket.socket, log: Log, mark: str) -> None:
        self._ticket, self._seat, self._log, self._mark = ticket, seat, log, mark
        self._head, self._stub = head, stub
        head.setblocking(False)
        self._woken = local_agent.ready()
        self._rank: int | None = None
        self._early: list[int] = []  # signals for a rank that has not been started
        self._control = -1  # where the rank's words are read
        self._out = b""
        self._line = b""  # of the head's, not ended yet
        self._word = b""  # of the rank's
        self._heard = time.monotonic()
        self._cut = False  # the rank is to die
        self._away = False  # nobody hears any more
        self._stacks: tuple[float, Log] | None = None  # when they are sent, and from where in the log

    def keep(self) -> None:
        """Start the rank when the head says so; return when nothing of it is left and the head knows, or is gone."""
        status: int | None = None
        while not self._cut and status is None:
            self._turn()
            status = local_agent.reap(self._rank) if self._rank is not None else None
        if self._rank is not None:
            code = local_agent.clear(self._rank, status)
            self._last_words()
            self._say({"tail": self._log.last_lines(LOOKED_AT)} if code not in (0, channel.STOPPED) else {})
            self._say({"ended": code})
        with contextlib.suppress(OSError):
            self._stub.send(ENDED, socket.MSG_DONTWAIT)
        while not self._away:
            self._turn()

    def _turn(self) -> None:
        """Wait a moment for anything, and take it in."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if self._stub.fileno() >= 0:
            poll.register(self._stub, select.POLLIN)
        if not self._away:
            poll.register(self._head, select.POLLIN | (select.POLLOUT if self._out else 0))
        if self._control >= 0 and len(self._out) < MOST:
            poll.register(self._control, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(1000 * PING / 2)}
        if self._woken in ready:
            os.read(self._woken, 512)
        if self._control in ready:
            self._relay()
        if self._stub.fileno() in ready:
            self._hear_stub()
        self._send_stacks()
        if not self._away:
            self._send()
            self._hear_head()
        with contextlib.suppress(OSError):
            self._stub.send(TICK, socket.MSG_DONTWAIT)

    def _hear_head(self) -> None:
        try:
            said = self._head.recv(CHUNK)
            self._heard = time.monotonic()
        except BlockingIOError:
            said = b"\n" if time.monotonic() - self._heard < SILENCE else b""
        except OSError:
            said = b""
        if not said:
            self._cut = self._away = True
            return
        *lines, self._line = (self._line + said).split(b"\n")
        for line in lines:
            self._obey(line)

    def _obey(self, line: bytes) -> None:
        match line:
            case b"ping":
                self._say({"here": True})
            case b"stop":
                self._hand_on(signal.SIGTERM)
            case b"stacks":
                self._stacks = (time.monotonic() + STACKS, self._log.from_here())
                self._hand_on(signal.SIGUSR2)
            case b"kill":
                self._cut = True
            case _ if line.startswith(b'{"go"') and self._rank is None:
                self._start(*json.loads(line)["go"])

    def _hand_on(self, number: int) -> None:
        if self._rank is None:
            self._early.append(number)
        else:
            local_agent.forward(self._rank, number)

    def _start(self, address: str, port: int) -> None:
        """Start the rank, with a pipe that it speaks into and one that ends when this process does."""
        seat = self._seat
        self._control, speak = os.pipe()
        held, self._held = os.pipe()
        for each in (speak, held):
            os.set_inheritable(each, True)
        place = Place(rank=seat.rank, ranks=seat.ranks, local_rank=seat.local, local_ranks=seat.locals, address=address, port=port)
        for name in openmpi.left(os.environ):
            del os.environ[name]
        os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"
        handed = {parent_watch.VARIABLE: str(held), channel.VARIABLE: str(speak), orphans.VARIABLE: self._mark}
        os.environ.update({**place.environment({**os.environ, **self._ticket.environment}), **handed})
        self._rank = local_agent.start(list(self._ticket.command))
        for number in self._early:
            local_agent.forward(self._rank, number)
        os.close(speak)
        os.close(held)

    def _relay(self) -> None:
        """Whole lines of the rank's to the head, apart from this process's own."""
        *lines, self._word = (self._word + os.read(self._control, CHUNK)).split(b"\n")
        self._out += b"".join(line + b"\n" for line in lines)

    def _last_words(self) -> None:
        """What the rank had said when it ended."""
        os.set_blocking(self._control, False)
        with contextlib.suppress(BlockingIOError):
            while said := os.read(self._control, CHUNK):
                self._word += said
        self._out += self._word + b"\n"
        os.close(self._control)
        self._control = -1

    def _hear_stub(self) -> None:
        said = b""
        with contextlib.suppress(OSError):
            said = self._stub.recv(64)
        if STOP in said:
            self._hand_on(signal.SIGTERM)
        if not said or ORPHAN in said:
            self._say({"orphan": True})
        if not said:
            self._stub.close()

    def _send_stacks(self) -> None:
        if self._stacks is not None and time.monotonic() >= self._stacks[0]:
            self._say({"stack": self._stacks[1].last_lines(LOOKED_AT)})
            self._stacks = None

    def _say(self, words: dict[str, object]) -> None:
        if words:
            self._out += f"{json.dumps(words)}\n".encode()

    def _send(self) -> None:
        try:
            self._out = self._out[self._head.send(self._out) :] if self._out else b""
        except BlockingIOError:
            return
        except OSError:
            self._cut = self._away = True


def _drop(ticket: Ticket, file: Path) -> None:
    """Remove the ticket, unless it is another start's by now."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        if Ticket.read(file) == ticket:
            file.unlink()


def _end(process: int) -> None:
    """Wait a moment for a process, of which this is a pidfd, to end by itself, then kill it."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    if not poll.poll(1000 * LEAVE):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
