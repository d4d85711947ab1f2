"""The bootstrap of a slot, which DeepSpeed's launcher starts on a host: python -m distrain.trainer.launch.agent.bootstrap RUN_DIR/run.json.

It registers with the controller by the join token, and forks the rank's agent (socket_agent.py) as a process that DeepSpeed's launcher
does not know: the launcher kills the processes that it knows 30 seconds after a SIGTERM, and a checkpoint may take longer. The bootstrap
itself stays the launcher's child as long as the rank runs. It forwards signals to the agent, reports to it when the launcher has died,
and ends what is left of the rank when the agent dies or is stopped; the agent ends this process and its launcher at the end.
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

from ...system.reserved_port import reserve_port
from . import orphans, protocol
from .join_token import JOIN_TOKEN_FILE, JoinToken
from .socket_agent import AgentConfig, run_agent

BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ANSWER_TIMEOUT = 30.0  # seconds for the controller to answer
MAX_LINE = 1 << 16  # bytes of the controller's answer
# By launcher, the variables in which it numbers a process: the rank, the number of ranks, and the rank on its host.
LAUNCHER_RANK_VARIABLES = {
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "launch": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
}
LAUNCHER_COMMANDS = (b"deepspeed.launcher.launch", b"orted", b"mpirun")  # in the command lines of processes that start this one


class RegistrationRefused(Exception):
    """This slot can't take part; the message says why, in one line."""


def main() -> int:
    """Bootstrap a slot; return 0 once its rank has ended and its agent has reported that."""
    folder = Path(sys.argv[1]).parent
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)  # so that a run that is asked to stop while it starts stops in order
    try:
        token = JoinToken.read(folder / JOIN_TOKEN_FILE)
        config = _agent_config(token, folder, os.environ)
        registration = _register(token, config)
    except (OSError, ValueError, KeyError, TypeError, RegistrationRefused) as error:
        print(f"a slot of {socket.gethostname()}: {error}", file=sys.stderr)
        return 1
    return _wait_for_agent(config, *_fork_agent(token, config, registration))


def _agent_config(token: JoinToken, folder: Path, environment: Mapping[str, str]) -> AgentConfig:
    """Return this slot's rank; raises RegistrationRefused where the launcher's numbers differ from the token's."""
    name = socket.gethostname()
    launcher = next((each for each, (rank, *_) in LAUNCHER_RANK_VARIABLES.items() if rank in environment), "launch")
    rank, ranks, local_rank = (int(environment[each]) for each in LAUNCHER_RANK_VARIABLES[launcher])
    if launcher != "launch" and token.hostnames.count(name) == 1:  # mpirun begins with the controller's host, and srun sorts hosts
        rank = token.first_rank(token.hostnames.index(name)) + local_rank
    host, expected = token.host_and_local_rank(rank)
    if (ranks, local_rank, name) != (token.ranks, expected, token.hostnames[host]):
        raise RegistrationRefused("DeepSpeed's launcher numbers hosts and slots differently from the controller")
    slots = len(token.slots[host])
    return AgentConfig(rank=rank, ranks=token.ranks, local_rank=local_rank, local_ranks=slots, host=host, folder=folder)


@dataclass(frozen=True, kw_only=True)
class Registration:
    """The connection to the controller, which has proved that it holds the token; and the port that rank 0 reserves for the ranks."""

    controller: socket.socket
    port: socket.socket | None


def _register(token: JoinToken, config: AgentConfig) -> Registration:
    """Register with the controller; both ends prove that they hold the join token (protocol.py lists the messages)."""
    address, port = token.controllers[config.host]
    try:
        controller = socket.create_connection((address, port), timeout=ANSWER_TIMEOUT)
    except OSError as error:
        raise RegistrationRefused(f"can't reach the run's controller at {address} port {port}: {error.strerror or error}") from None
    controller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reserved = reserve_port() if config.rank == 0 else None
    nonce = os.urandom(16).hex()
    reserved_port = reserved.getsockname()[1] if reserved else 0
    _send_line(controller, {"rank": config.rank, "nonce": nonce, "port": reserved_port})
    answer = json.loads(_read_line(controller))
    if not compare_digest(answer["proof"], token.proof("controller", config.rank, nonce, answer["nonce"])):
        raise RegistrationRefused(f"the process that listens at {address} port {port} is not this run's controller")
    _send_line(controller, {"proof": token.proof("agent", config.rank, nonce, answer["nonce"], reserved_port)})
    return Registration(controller=controller, port=reserved)


def _send_line(controller: socket.socket, message: Mapping[str, object]) -> None:
    controller.sendall(f"{json.dumps(message)}\n".encode())


def _read_line(controller: socket.socket) -> bytes:
    """Read one line and no byte after it."""
    line = b""
    while not line.endswith(b"\n"):
        if len(line) > MAX_LINE or not (byte := controller.recv(1)):
            raise RegistrationRefused("the run's controller has closed the connection")
        line += byte
    return line


def _fork_agent(token: JoinToken, config: AgentConfig, registration: Registration) -> tuple[int, socket.socket, str]:
    """Fork the agent, detached from the launcher; return its pidfd, the socket to it, and the mark of its rank's processes."""
    mark = orphans.new_mark()
    bootstrap, launcher = os.getpid(), _launcher()
    ours, theirs = socket.socketpair()
    between = os.fork()
    if between == 0:
        try:
            os.setsid()
            ours.close()
            watched = [os.pidfd_open(each) for each in (bootstrap, *launcher)]
            if os.fork() != 0:
                os._exit(0)
            theirs.sendall(os.getpid().to_bytes(4, "big"))
            run_agent(token, config, registration.controller, theirs, watched, mark)
        finally:
            os._exit(1)
    theirs.close()
    registration.controller.close()
    if registration.port:
        registration.port.close()
    agent = os.pidfd_open(int.from_bytes(ours.recv(4, socket.MSG_WAITALL), "big"))
    os.waitpid(between, 0)
    return agent, ours, mark


def _launcher() -> list[int]:
    """Return the launcher's process id; empty if it has died and this process has another parent."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        command_line = Path(f"/proc/{parent}/cmdline").read_bytes()
        if any(launcher in command_line for launcher in LAUNCHER_COMMANDS):
            return [parent]
    return []


def _wait_for_agent(config: AgentConfig, agent: int, connection: socket.socket, mark: str) -> int:
    """Wait until the agent reports that its rank has ended, or is gone; return the exit status."""
    launcher, reported = os.getppid(), False
    for each in BLOCKED_SIGNALS:
        signal.signal(each, lambda *_: _send(connection, protocol.BOOTSTRAP_STOP))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)
    heard_at, alive = time.monotonic(), True
    while alive:
        if select.select([connection], [], [], 1.0)[0]:
            data = connection.recv(64)
            if protocol.RANK_ENDED in data:
                return 0
            heard_at, alive = time.monotonic(), bool(data)
        else:
            alive = time.monotonic() - heard_at < protocol.HEARTBEAT_TIMEOUT
        if os.getppid() != launcher and not reported:
            reported = True
            _send(connection, protocol.BOOTSTRAP_ORPHANED)
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(agent, signal.SIGKILL)
    orphans.kill_marked_processes(mark)
    print(f"rank {config.rank}: its agent died", file=sys.stderr)
    return 1


def _send(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.send(data, socket.MSG_DONTWAIT)


if __name__ == "__main__":
    raise SystemExit(main())
