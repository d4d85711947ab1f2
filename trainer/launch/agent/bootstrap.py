"""A slot's process on a host, as DeepSpeed's launcher starts it: python -m distrain.trainer.launch.agent.bootstrap RUN_DIR/run.json.

It goes to the head with its ticket, and forks the rank's keeper (tether.py) as a process that DeepSpeed's launcher does not
know: that kills what it knows 30 seconds after a SIGTERM, however long a checkpoint takes. What stays behind here is the
launcher's child as long as the rank runs. It hands signals on to the keeper, tells it when the launcher has died, and ends
what is left of the rank when the keeper dies or is stopped; the keeper ends this process and its launcher at the end.
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
from collections.abc import Mapping
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path

from ..rank.environment import reserve_port
from . import orphans
from .remote_agent import ENDED, ORPHAN, SILENCE, STOP, Seat, tethered
from .token import NAME, Ticket

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MEET = 30.0  # seconds for the head to answer
LONGEST = 1 << 16  # bytes of a line of its
# Variables by which a launcher counts: the rank, of how many, and its place among those of its host.
COUNTS = {
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "launch": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
}
LAUNCHERS = (b"deepspeed.launcher.launch", b"orted", b"mpirun")  # by their command lines, those that start this process


class Refused(Exception):
    """Why this slot takes no part, in a line."""


def main() -> int:
    """Be a slot of the run; 0 once its rank has ended and the head knows how."""
    folder = Path(sys.argv[1]).parent
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # a run that is told to stop while it starts stops in order
    try:
        ticket = Ticket.read(folder / NAME)
        seat = _seat(ticket, folder, os.environ)
        met = _meet(ticket, seat)
    except (OSError, ValueError, KeyError, TypeError, Refused) as error:
        print(f"a slot of {socket.gethostname()}: {error}", file=sys.stderr)
        return 1
    return _stay(seat, *_forked(ticket, seat, met))


def _seat(ticket: Ticket, folder: Path, environment: Mapping[str, str]) -> Seat:
    """Who this is; raises Refused where the launcher counts otherwise than the ticket."""
    name = socket.gethostname()
    launcher = next((each for each, (rank, *_) in COUNTS.items() if rank in environment), "launch")
    rank, ranks, here = (int(environment[each]) for each in COUNTS[launcher])
    if launcher != "launch" and ticket.names.count(name) == 1:  # mpirun begins with the head's host, and srun sorts them
        rank = ticket.first(ticket.names.index(name)) + here
    host, local = ticket.seat(rank)
    if (ranks, here, name) != (ticket.ranks, local, ticket.names[host]):
        raise Refused("DeepSpeed's launcher counts hosts and slots otherwise than the head")
    return Seat(rank=rank, ranks=ticket.ranks, local=local, locals=len(ticket.slots[host]), host=host, folder=folder)


@dataclass(frozen=True, kw_only=True)
class Met:
    """The head, which has proved that it is; and the port that rank 0 keeps for the ranks' meeting."""

    head: socket.socket
    port: socket.socket | None


def _meet(ticket: Ticket, seat: Seat) -> Met:
    """Come to the head; both prove that they hold the ticket."""
    address, port = ticket.doors[seat.host]
    try:
        head = socket.create_connection((address, port), timeout=MEET)
    except OSError as error:
        raise Refused(f"can't reach the run's head at {address} port {port}: {error.strerror or error}") from None
    head.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    kept = reserve_port() if seat.rank == 0 else None
    mine = os.urandom(16).hex()
    hello = {"rank": seat.rank, "nonce": mine, "port": kept.getsockname()[1] if kept else 0}
    head.sendall(f"{json.dumps(hello)}\n".encode())
    answer = json.loads(_line(head))
    if not compare_digest(answer["proof"], ticket.proof("head", seat.rank, mine, answer["nonce"])):
        raise Refused(f"whoever listens at {address} port {port} is not this run's head")
    head.sendall(f"{json.dumps({'proof': ticket.proof('rank', seat.rank, mine, answer['nonce'], hello['port'])})}\n".encode())
    return Met(head=head, port=kept)


def _line(head: socket.socket) -> bytes:
    """One line, and nothing of what follows it."""
    read = b""
    while not read.endswith(b"\n"):
        if len(read) > LONGEST or not (byte := head.recv(1)):
            raise Refused("the run's head has gone")
        read += byte
    return read


def _forked(ticket: Ticket, seat: Seat, met: Met) -> tuple[int, socket.socket, str]:
    """Fork the keeper out of the launcher's family: a pidfd of it, the line to it, the mark of what its rank starts."""
    mark = orphans.new_mark()
    stub, launchers = os.getpid(), _launcher()
    ours, theirs = socket.socketpair()
    between = os.fork()
    if between == 0:
        try:
            os.setsid()
            ours.close()
            watched = [os.pidfd_open(each) for each in (stub, *launchers)]
            if os.fork() != 0:
                os._exit(0)
            theirs.sendall(os.getpid().to_bytes(4, "big"))
            tethered(ticket, seat, met.head, theirs, watched, mark)
        finally:
            os._exit(1)
    theirs.close()
    met.head.close()
    if met.port:
        met.port.close()
    keeper = os.pidfd_open(int.from_bytes(ours.recv(4, socket.MSG_WAITALL), "big"))
    os.waitpid(between, 0)
    return keeper, ours, mark


def _launcher() -> list[int]:
    """The launcher, unless it has died and left this process to another."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{parent}/cmdline").read_bytes()
        if any(launcher in words for launcher in LAUNCHERS):
            return [parent]
    return []


def _stay(seat: Seat, keeper: int, line: socket.socket, mark: str) -> int:
    """Stay until the keeper says that its rank has ended, or until there is no keeper."""
    launcher, told = os.getppid(), False
    for each in STOPS:
        signal.signal(each, lambda *_: _tell(line, STOP))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    heard, alive = time.monotonic(), True
    while alive:
        if select.select([line], [], [], 1.0)[0]:
            said = line.recv(64)
            if ENDED in said:
                return 0
            heard, alive = time.monotonic(), bool(said)
        else:
            alive = time.monotonic() - heard < SILENCE
        if os.getppid() != launcher and not told:
            told = True
            _tell(line, ORPHAN)
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(keeper, signal.SIGKILL)
    orphans.kill(mark)
    print(f"rank {seat.rank}: its keeper died", file=sys.stderr)
    return 1


def _tell(line: socket.socket, word: bytes) -> None:
    with contextlib.suppress(OSError):
        line.send(word, socket.MSG_DONTWAIT)


if __name__ == "__main__":
    raise SystemExit(main())
