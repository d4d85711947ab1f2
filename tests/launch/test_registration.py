"""Agents that register with a controller must hold its join token, and they check that the controller holds it too."""

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

from distrain.tests.fakes.deadline import DEADLINE
from distrain.trainer.launch.agent.join_token import JOIN_TOKEN_FILE, JoinToken
from distrain.trainer.launch.supervisor import registration as rendezvous
from distrain.trainer.launch.supervisor.registration import MAX_LINE, Rendezvous
from distrain.trainer.launch.supervisor.remote_rank import RemoteRank
from distrain.trainer.system.child_process import end_child

TOKEN = JoinToken(
    secret="5" * 64, controllers=[("127.0.0.1", 0)], hostnames=["h0", "h1"], slots=[(0, 1), (4, 5, 7)], command=["true"], environment={}
)


class Controller:
    """A rendezvous that expects five ranks, and the ranks that have registered."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.registered: list[int] = []
        self.rendezvous = Rendezvous(self.selector, lambda rank: self.registered.append(rank.rank))
        self.port = self.rendezvous.listen(["127.0.0.1"])["127.0.0.1"]
        self.ranks = [RemoteRank(rank, "a host", Path("log")) for rank in range(TOKEN.ranks)]
        self.rendezvous.admit(TOKEN, self.ranks)

    def poll(self) -> None:
        for key, _ in self.selector.select(0.05):
            key.data()

    def close(self) -> None:
        self.rendezvous.close()
        for rank in self.ranks:
            rank.close(0.0)
        self.selector.close()


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    monkeypatch.setattr(rendezvous, "PROOF_TIMEOUT", DEADLINE)
    made = Controller()
    yield made
    made.close()


def answer(controller: Controller, connection: socket.socket) -> bytes:
    """Return the controller's next line; empty if it closes the connection."""
    connection.settimeout(0.05)
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        controller.poll()
        try:
            return connection.recv(4096)
        except TimeoutError:
            continue
        except ConnectionResetError:
            return b""
    raise AssertionError("no answer")


def send_hello(controller: Controller, rank: object) -> tuple[socket.socket, dict[str, str]]:
    """Connect as a rank; return the connection, and the controller's answer."""
    connection = socket.create_connection(("127.0.0.1", controller.port))
    connection.sendall(json.dumps({"rank": rank, "nonce": "n", "port": 7}).encode() + b"\n")
    return connection, json.loads(answer(controller, connection))


def test_a_rank_has_the_host_and_local_rank_of_its_slot() -> None:
    assert [TOKEN.host_and_local_rank(rank) for rank in range(TOKEN.ranks)] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    with pytest.raises(IndexError):
        TOKEN.host_and_local_rank(5)


def test_a_join_token_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN.text())
    assert JoinToken.read(tmp_path / "token").proof("agent", 1) == TOKEN.proof("agent", 1) != TOKEN.proof("controller", 1)


def test_an_agent_with_the_token_registers_once_and_can_trust_the_controller(controller: Controller) -> None:
    connection, reply = send_hello(controller, 3)
    assert reply["proof"] == TOKEN.proof("controller", 3, "n", reply["nonce"])
    proof = TOKEN.proof("agent", 3, "n", reply["nonce"], 7)
    connection.sendall(json.dumps({"proof": proof}).encode() + b"\n")
    while not controller.registered:
        controller.poll()
    assert (controller.registered, controller.ranks[3].is_registered, controller.ranks[3].port) == ([3], True, 7)
    again, reply = send_hello(controller, 3)
    again.sendall(json.dumps({"proof": TOKEN.proof("agent", 3, "n", reply["nonce"], 7)}).encode() + b"\n")
    assert answer(controller, again) == b""
    assert controller.registered == [3]
    connection.close()
    again.close()


# fmt: off
PROOFS: tuple[Callable[[str], object], ...] = (
    lambda nonce: {"proof": TOKEN.proof("agent", 2, "n", nonce, 7)},      # another rank's
    lambda nonce: {"proof": TOKEN.proof("controller", 3, "n", nonce)},         # the controller's own, sent back
    lambda nonce: {"proof": TOKEN.proof("agent", 3, "n", "before", 7)},   # with another nonce
    lambda nonce: {"proof": ""},
    lambda nonce: {"proof": None},
    lambda nonce: {},
    lambda nonce: [],
)
# fmt: on


@pytest.mark.parametrize("proof", PROOFS)
def test_a_connection_without_proof_is_closed(controller: Controller, proof) -> None:
    connection, reply = send_hello(controller, 3)
    connection.sendall(json.dumps(proof(reply["nonce"])).encode() + b"\n")
    assert answer(controller, connection) == b""
    assert (controller.registered, controller.ranks[3].is_registered) == ([], False)
    connection.close()


# fmt: off
NOISE = (
    b"GET / HTTP/1.0\r\n\r\n",
    b"\0" * MAX_LINE + b"\0",
    b"[" * 4000 + b"\n",
    b"[" * (MAX_LINE - 1) + b"\n",
    b'{"rank": "x", "nonce": 1, "port": 2}\n',
    b'{"rank": Infinity, "nonce": "n", "port": 2}\n',
    b'{"rank": 1, "nonce": "n", "port": 1e999}\n',
    b'{"rank": 1, "nonce": ["n"], "port": 2}\n',
    b"[]\n",
    b"5\n",
    b"\xff\n",
)
# fmt: on


@pytest.mark.parametrize("data", NOISE)
def test_a_connection_that_sends_anything_else_is_closed(controller: Controller, data: bytes) -> None:
    connection = socket.create_connection(("127.0.0.1", controller.port))
    connection.sendall(data)
    assert answer(controller, connection) == b""
    connection.close()


def test_a_connection_that_closes_while_it_is_rejected_does_no_harm(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    """One poll reports both: the newcomer, at whose arrival the late connection is rejected, and the end of the late one."""
    monkeypatch.setattr(rendezvous, "PROOF_TIMEOUT", 0.0)
    late = socket.create_connection(("127.0.0.1", controller.port))
    controller.poll()
    newcomer = socket.create_connection(("127.0.0.1", controller.port))
    late.close()
    newcomer.sendall(b"[]\n")
    assert answer(controller, newcomer) == b""
    newcomer.close()


def register(controller: Controller, rank: int, connection: socket.socket) -> None:
    """Complete the registration of a rank that has sent its hello."""
    reply = json.loads(answer(controller, connection))
    connection.sendall(json.dumps({"proof": TOKEN.proof("agent", rank, "n", reply["nonce"], 7)}).encode() + b"\n")
    while not controller.registered:
        controller.poll()


def test_connections_that_fill_the_queue_do_not_keep_a_rank_out(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MAX_PENDING", 3)
    others = [socket.create_connection(("127.0.0.1", controller.port)) for _ in range(6)]
    connection = socket.create_connection(("127.0.0.1", controller.port))
    connection.sendall(b'{"rank": 3, "nonce": "n", "port": 7}\n')
    register(controller, 3, connection)
    for each in (connection, *others):
        each.close()


def test_a_controller_that_can_open_no_more_files_still_registers_a_rank(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process opens so many connections that no file is left; then an agent with the token connects."""
    program = (
        f"import socket\nall = [socket.create_connection(('127.0.0.1', {controller.port})) for _ in range(40)]\nprint(flush=True)\ninput()"
    )
    others = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert others.stdout is not None
        others.stdout.readline()
        with socket.create_connection(("127.0.0.1", controller.port)) as connection:
            connection.sendall(b'{"rank": 3, "nonce": "n", "port": 7}\n')
            free = sorted(set(range(1000)) - set(map(int, os.listdir("/proc/self/fd"))))
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[10], before[1]))
            register(controller, 3, connection)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        end_child(others)
    assert controller.registered == [3]


def test_a_rank_without_a_slot_is_rejected(controller: Controller) -> None:
    connection, reply = send_hello(controller, 17)
    connection.sendall(json.dumps({"proof": TOKEN.proof("agent", 17, "n", reply["nonce"], 7)}).encode() + b"\n")
    assert answer(controller, connection) == b""
    connection.close()


HOSTNAME = socket.gethostname()
MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def bootstrap(
    folder: Path, controller: tuple[str, int], hostnames: Sequence[str] = (HOSTNAME,), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a slot's bootstrap with a token for this controller, for hosts of these names with two slots each."""
    (folder / "launch").mkdir()
    (folder / "ranks").mkdir()
    hosts = len(hostnames)
    token = JoinToken(
        secret=TOKEN.secret,
        controllers=[controller] * hosts,
        hostnames=hostnames,
        slots=[(0, 1)] * hosts,
        command=["true"],
        environment={},
    )
    (folder / JOIN_TOKEN_FILE).write_text(token.text())
    environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **variables}
    command = [sys.executable, "-m", "distrain.trainer.launch.agent.bootstrap", str(folder / "run.json")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE)


def test_a_bootstrap_obeys_no_controller_without_the_token(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    impostor = os.fork()
    if impostor == 0:
        try:
            connection, _ = listener.accept()
            connection.recv(4096)
            connection.sendall(b'{"nonce": "n", "proof": "' + b"0" * 64 + b'"}\n{"start": ["127.0.0.1", 1]}\n')
            connection.recv(4096)
        finally:
            os._exit(0)
    try:
        done = bootstrap(tmp_path, ("127.0.0.1", listener.getsockname()[1]))
    finally:
        os.kill(impostor, signal.SIGKILL)
        os.waitpid(impostor, 0)
        listener.close()
    assert (done.returncode, list((tmp_path / "ranks").iterdir())) == (1, [])
    assert "is not this run's controller" in done.stderr


def test_a_bootstrap_that_can_not_reach_the_controller_reports_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens there
        port = taken.getsockname()[1]
        done = bootstrap(tmp_path, ("127.0.0.1", port))
    assert done.returncode == 1
    assert done.stderr == f"a slot of {HOSTNAME}: can't reach the run's controller at 127.0.0.1 port {port}: Connection refused\n"


@pytest.mark.parametrize("variables", [{"WORLD_SIZE": "4"}, {"LOCAL_RANK": "0"}, {"OMPI_COMM_WORLD_RANK": "0", **MPI}])
def test_a_bootstrap_that_is_numbered_differently_refuses(tmp_path: Path, variables: dict[str, str]) -> None:
    done = bootstrap(tmp_path, ("127.0.0.1", 1), **variables)
    line = f"a slot of {HOSTNAME}: DeepSpeed's launcher numbers hosts and slots differently from the controller\n"
    assert (done.returncode, done.stderr) == (1, line)


def test_a_bootstrap_on_a_host_of_another_name_refuses(tmp_path: Path) -> None:
    assert "differently from the controller" in bootstrap(tmp_path, ("127.0.0.1", 1), hostnames=("another",)).stderr


def test_a_bootstrap_under_mpirun_takes_the_rank_of_its_host_in_the_hostfile(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    run = partial(bootstrap, tmp_path, listener.getsockname(), hostnames=("another", HOSTNAME), OMPI_COMM_WORLD_RANK="1", **MPI)
    with ThreadPoolExecutor() as pool:
        done = pool.submit(run)
        connection, _ = listener.accept()
        assert json.loads(connection.recv(4096))["rank"] == 3
        connection.close()
        assert done.result().returncode == 1
    listener.close()
