"""Who comes to a run's head must hold its ticket, and who holds it learns whether the head does."""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from distrain.trainer.launch.agent.token import NAME, Ticket
from distrain.trainer.launch.supervisor import rendezvous as doors
from distrain.trainer.launch.supervisor.remote_rank import Remote
from distrain.trainer.launch.supervisor.rendezvous import LONGEST, Door
from distrain.trainer.system.end_child import end_child

TICKET = Ticket(token="5" * 64, doors=[("127.0.0.1", 0)], names=["h0", "h1"], slots=[(0, 1), (4, 5, 7)], command=["true"], environment={})
DEADLINE = 60.0  # seconds


class Head:
    """A door at which five ranks are expected, and who has come."""

    def __init__(self) -> None:
        self.ears = selectors.DefaultSelector()
        self.came: list[int] = []
        self.door = Door(self.ears, lambda remote: self.came.append(remote.rank))
        self.port = self.door.open(["127.0.0.1"])["127.0.0.1"]
        self.remotes = [Remote(rank, "a host", Path("log")) for rank in range(TICKET.ranks)]
        self.door.admit(TICKET, self.remotes)

    def turn(self) -> None:
        for key, _ in self.ears.select(0.05):
            key.data()

    def close(self) -> None:
        self.door.close()
        for remote in self.remotes:
            remote.close(0.0)
        self.ears.close()


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head()
    yield made
    made.close()


def answer(head: Head, connection: socket.socket) -> bytes:
    """What the head says next; empty where it hangs up."""
    connection.settimeout(0.05)
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        head.turn()
        try:
            return connection.recv(4096)
        except TimeoutError:
            continue
        except ConnectionResetError:
            return b""
    raise AssertionError("no answer")


def hello(head: Head, rank: object) -> tuple[socket.socket, dict[str, str]]:
    """A stranger who names itself a rank: the connection, and what the head answers."""
    connection = socket.create_connection(("127.0.0.1", head.port))
    connection.sendall(json.dumps({"rank": rank, "nonce": "n", "port": 7}).encode() + b"\n")
    return connection, json.loads(answer(head, connection))


def test_a_rank_sits_where_its_slot_is() -> None:
    assert [TICKET.seat(rank) for rank in range(TICKET.ranks)] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    with pytest.raises(IndexError):
        TICKET.seat(5)


def test_a_ticket_is_what_was_written(tmp_path: Path) -> None:
    (tmp_path / "ticket").write_text(TICKET.written())
    assert Ticket.read(tmp_path / "ticket").proof("rank", 1) == TICKET.proof("rank", 1) != TICKET.proof("head", 1)


def test_who_holds_the_ticket_comes_in_once_and_knows_the_head(head: Head) -> None:
    connection, said = hello(head, 3)
    assert said["proof"] == TICKET.proof("head", 3, "n", said["nonce"])
    proof = TICKET.proof("rank", 3, "n", said["nonce"], 7)
    connection.sendall(json.dumps({"proof": proof}).encode() + b"\n")
    while not head.came:
        head.turn()
    assert (head.came, head.remotes[3].here, head.remotes[3].port) == ([3], True, 7)
    again, said = hello(head, 3)
    again.sendall(json.dumps({"proof": TICKET.proof("rank", 3, "n", said["nonce"], 7)}).encode() + b"\n")
    assert answer(head, again) == b""
    assert head.came == [3]
    connection.close()
    again.close()


# fmt: off
PROOFS: tuple[Callable[[str], object], ...] = (
    lambda nonce: {"proof": TICKET.proof("rank", 2, "n", nonce, 7)},      # another rank's
    lambda nonce: {"proof": TICKET.proof("head", 3, "n", nonce)},         # the head's own, sent back
    lambda nonce: {"proof": TICKET.proof("rank", 3, "n", "before", 7)},   # of another meeting
    lambda nonce: {"proof": ""},
    lambda nonce: {"proof": None},
    lambda nonce: {},
    lambda nonce: [],
)
# fmt: on


@pytest.mark.parametrize("proof", PROOFS)
def test_who_proves_nothing_is_sent_away(head: Head, proof) -> None:
    connection, said = hello(head, 3)
    connection.sendall(json.dumps(proof(said["nonce"])).encode() + b"\n")
    assert answer(head, connection) == b""
    assert (head.came, head.remotes[3].here) == ([], False)
    connection.close()


# fmt: off
NOISE = (
    b"GET / HTTP/1.0\r\n\r\n",
    b"\0" * LONGEST + b"\0",
    b"[" * 4000 + b"\n",
    b"[" * (LONGEST - 1) + b"\n",
    b'{"rank": "x", "nonce": 1, "port": 2}\n',
    b'{"rank": Infinity, "nonce": "n", "port": 2}\n',
    b'{"rank": 1, "nonce": "n", "port": 1e999}\n',
    b'{"rank": 1, "nonce": ["n"], "port": 2}\n',
    b"[]\n",
    b"5\n",
    b"\xff\n",
)
# fmt: on


@pytest.mark.parametrize("words", NOISE)
def test_noise_at_the_door_is_sent_away(head: Head, words: bytes) -> None:
    connection = socket.create_connection(("127.0.0.1", head.port))
    connection.sendall(words)
    assert answer(head, connection) == b""
    connection.close()


def test_a_stranger_that_goes_as_it_is_sent_away_ends_no_head(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are seen in one look: the newcomer, for whom the late one is sent away, and the late one's end."""
    monkeypatch.setattr(doors, "MEET", 0.0)
    late = socket.create_connection(("127.0.0.1", head.port))
    head.turn()
    newcomer = socket.create_connection(("127.0.0.1", head.port))
    late.close()
    newcomer.sendall(b"[]\n")
    assert answer(head, newcomer) == b""
    newcomer.close()


def comes_in(head: Head, rank: int, connection: socket.socket) -> None:
    """What a rank with the ticket says, after its hello."""
    said = json.loads(answer(head, connection))
    connection.sendall(json.dumps({"proof": TICKET.proof("rank", rank, "n", said["nonce"], 7)}).encode() + b"\n")
    while not head.came:
        head.turn()


def test_strangers_who_fill_the_door_keep_no_rank_out(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "STRANGERS", 3)
    strangers = [socket.create_connection(("127.0.0.1", head.port)) for _ in range(6)]
    connection = socket.create_connection(("127.0.0.1", head.port))
    connection.sendall(b'{"rank": 3, "nonce": "n", "port": 7}\n')
    comes_in(head, 3, connection)
    for each in (connection, *strangers):
        each.close()


def test_a_head_that_may_open_no_more_files_lets_a_rank_in(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has so many connections stand at the door that no file is left; then comes who holds the ticket."""
    monkeypatch.setattr(doors, "MEET", 1e9)
    stand = f"import socket\nall = [socket.create_connection(('127.0.0.1', {head.port})) for _ in range(40)]\nprint(flush=True)\ninput()"
    others = subprocess.Popen([sys.executable, "-c", stand], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert others.stdout is not None
        others.stdout.readline()
        with socket.create_connection(("127.0.0.1", head.port)) as connection:
            connection.sendall(b'{"rank": 3, "nonce": "n", "port": 7}\n')
            free = sorted(set(range(1000)) - set(map(int, os.listdir("/proc/self/fd"))))
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[10], before[1]))
            comes_in(head, 3, connection)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        end_child(others)
    assert head.came == [3]


def test_a_rank_that_no_slot_has_is_sent_away(head: Head) -> None:
    connection, said = hello(head, 17)
    connection.sendall(json.dumps({"proof": TICKET.proof("rank", 17, "n", said["nonce"], 7)}).encode() + b"\n")
    assert answer(head, connection) == b""
    connection.close()


HERE = socket.gethostname()
MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def guest(folder: Path, door: tuple[str, int], names: Sequence[str] = (HERE,), **environment: str) -> subprocess.CompletedProcess[str]:
    """A slot's process with a ticket to this door, for hosts that call themselves so, of two slots each."""
    (folder / "launch").mkdir()
    (folder / "ranks").mkdir()
    each = len(names)
    there = Ticket(token=TICKET.token, doors=[door] * each, names=names, slots=[(0, 1)] * each, command=["true"], environment={})
    (folder / NAME).write_text(there.written())
    known = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **environment}
    words = [sys.executable, "-m", "distrain.trainer.launch.agent.bootstrap", str(folder / "run.json")]
    return subprocess.run(words, env=known, capture_output=True, text=True, timeout=DEADLINE)


def test_a_guest_obeys_no_head_without_the_ticket(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    stranger = os.fork()
    if stranger == 0:
        try:
            connection, _ = listener.accept()
            connection.recv(4096)
            connection.sendall(b'{"nonce": "n", "proof": "' + b"0" * 64 + b'"}\n{"go": ["127.0.0.1", 1]}\n')
            connection.recv(4096)
        finally:
            os._exit(0)
    try:
        done = guest(tmp_path, ("127.0.0.1", listener.getsockname()[1]))
    finally:
        os.kill(stranger, signal.SIGKILL)
        os.waitpid(stranger, 0)
        listener.close()
    assert (done.returncode, list((tmp_path / "ranks").iterdir())) == (1, [])
    assert "is not this run's head" in done.stderr


def test_a_guest_that_can_not_reach_the_head_says_so(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens there
        port = taken.getsockname()[1]
        done = guest(tmp_path, ("127.0.0.1", port))
    assert done.returncode == 1
    assert done.stderr == f"a slot of {HERE}: can't reach the run's head at 127.0.0.1 port {port}: Connection refused\n"


@pytest.mark.parametrize("environment", [{"WORLD_SIZE": "4"}, {"LOCAL_RANK": "0"}, {"OMPI_COMM_WORLD_RANK": "0", **MPI}])
def test_a_guest_that_is_counted_otherwise_takes_no_part(tmp_path: Path, environment: dict[str, str]) -> None:
    done = guest(tmp_path, ("127.0.0.1", 1), **environment)
    assert (done.returncode, done.stderr) == (1, f"a slot of {HERE}: DeepSpeed's launcher counts hosts and slots otherwise than the head\n")


def test_a_guest_of_a_host_that_is_another_takes_no_part(tmp_path: Path) -> None:
    assert "otherwise than the head" in guest(tmp_path, ("127.0.0.1", 1), names=("another",)).stderr


def test_a_guest_of_mpirun_s_that_counts_from_its_own_host_takes_the_seat_that_its_host_has(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    there = partial(guest, tmp_path, listener.getsockname(), names=("another", HERE), OMPI_COMM_WORLD_RANK="1", **MPI)
    with ThreadPoolExecutor() as pool:
        done = pool.submit(there)
        connection, _ = listener.accept()
        assert json.loads(connection.recv(4096))["rank"] == 3
        connection.close()
        assert done.result().returncode == 1
    listener.close()
