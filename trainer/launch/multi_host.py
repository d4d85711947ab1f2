"""Launches a run's ranks on several hosts through DeepSpeed's launcher, which only starts processes.

The controller (this process) uploads the run's files to each host over ssh (hosts/upload_remote.py), listens where the hosts reach it
(supervisor/registration.py), and starts the launcher. The bootstrap of each slot registers with the join token that it finds on its host;
when all have registered, the controller has the ranks started. From then on it supervises them over their agents' sockets
(agent/protocol.py). Results come from the agents; the launcher's exit status is ignored. The processes are

    controller's host:  distrain fit -> the launcher's agent -> deepspeed.launcher.runner -> pdsh -> ssh to each host
    each host:          sshd -> deepspeed.launcher.launch -> a bootstrap for each slot;    a rank's agent -> the rank

With launch.runner=openmpi mpirun takes pdsh's place, and on the hosts its daemon orted takes launch's (on the controller's own host mpirun
itself does). With launch.runner=slurm srun takes pdsh's place, and slurmstepd takes launch's.

A process that dies is noticed by others: the controller by the launcher's agent and the ranks' agents; an agent by the controller, the
bootstrap and the rank, which dies with it; the launcher by the bootstraps and the controller; a bootstrap by its agent.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..system import open_files
from ..system.stop_requests import StopRequests, collect_stop_requests
from .agent.join_token import JOIN_TOKEN_FILE, JoinToken
from .agent.protocol import HEARTBEAT_INTERVAL
from .commands.command import Command, LaunchFile
from .hosts.hostfile import Host
from .hosts.ssh import SshInterrupted
from .hosts.upload import UnreachableHosts, connect_hosts, on_every_host
from .rank.channel import ignore_text
from .rank.log import SEARCHED_LINES, exception_line, open_log_file
from .supervisor.local_rank import LocalRank, start_under_agent
from .supervisor.outcome import FAILED, Outcome
from .supervisor.registration import Rendezvous
from .supervisor.remote_rank import RemoteRank
from .supervisor.supervisor import Show, Supervisor
from .supervisor.watchdog import Watchdog

REGISTER_TIMEOUT = 300.0  # seconds for the first slot to register, and for another after the last one
LAUNCHER_WAIT = 8.0  # seconds for the launcher to end by itself after its last rank
LAUNCHER_WAIT_FAILED = 2.0  # after a run that failed
LOST_GRACE = 1.0  # seconds that ranks have after another was lost: none can finish its step
MPIRUN_RULE = re.compile(r"-{9,}")
LAUNCHER_LOG_LINE = re.compile(r"\[.*\] \[(INFO|WARNING)\] ")  # what DeepSpeed's launcher logs at each start


@dataclass(frozen=True, kw_only=True)
class MultiHostLaunch:
    """What is started, and where: `launcher` starts a bootstrap for each slot of the hosts, and each runs `command` as a rank."""

    hosts: Sequence[Host]
    folder: Path  # RUN_DIR
    launcher: Command
    files: Sequence[LaunchFile]  # that the launcher reads
    texts: Mapping[str, str]  # files that ranks read, by name in RUN_DIR
    command: Sequence[str]
    environment: Mapping[str, str]  # of this process
    forwarded: Mapping[str, str]  # those of its variables that the ranks get too
    address: str | None = None  # where the ranks meet; None: the address from which rank 0 registers
    port: int | None = None  # None: one that rank 0 reserves


def launch_remote_ranks(
    launch: MultiHostLaunch,
    *,
    show: Show,
    grace: float,
    live: Show | None = None,
    watchdog: Watchdog | None = None,
    on_first_step: Callable[[int], None] | None = None,
    stop_requests: StopRequests | None = None,
) -> Outcome:
    """Run the ranks until all have ended; return the outcome. The parameters are those of `single_host.launch_local_ranks`."""
    with collect_stop_requests(stop_requests) as requests, _ignore_terminal_stop(), ExitStack() as stack:
        supervisor = MultiHostSupervisor(
            requests,
            stack,
            show=show,
            live=live or ignore_text,
            grace=grace,
            watchdog=watchdog or Watchdog(),
            on_first_step=on_first_step,
        )
        try:
            return supervisor.launch(launch)
        except UnreachableHosts as error:
            return Outcome(status=FAILED, ranks=(), says=str(error), hosts=error.hosts)
        except OSError as error:
            return Outcome(status=FAILED, ranks=(), says=f"can't be started: {error}")


@contextmanager
def _ignore_terminal_stop() -> Iterator[None]:
    """Ignore Ctrl-Z: a controller that is stopped looks dead to its ranks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)


class StartFailed(Exception):
    """Not all ranks registered; `outcome` is the attempt's."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.says)
        self.outcome = outcome


class MultiHostSupervisor(Supervisor):
    """Supervises ranks that register over the network, and the launcher that starts their bootstraps."""

    _launcher: LocalRank
    _remote_ranks: Sequence[RemoteRank] = ()

    def launch(self, launch: MultiHostLaunch) -> Outcome:
        """Upload the files, start the launcher, wait until all ranks have registered, and supervise them until all have ended."""
        if problem := open_files.raise_limit(open_files.needed_files(sum(len(host.slots) for host in launch.hosts), len(launch.hosts))):
            return Outcome(status=FAILED, ranks=(), says=str(problem))
        with Rendezvous(self._selector, self.add) as rendezvous, self._send_heartbeats():
            try:
                with self._upload_files(launch, rendezvous):
                    self._start_launcher(launch)
                    self._wait_for_registrations()
            except SshInterrupted as error:
                return _interrupted_outcome(error.number)
            except StartFailed as error:
                return error.outcome
            rendezvous.close()
            for rank in self._remote_ranks:
                rank.start(launch.address or _meeting_address(self._remote_ranks), launch.port or self._remote_ranks[0].port)
            outcome = self.run()
        self._wait_for_launcher(LAUNCHER_WAIT if outcome.status != FAILED else LAUNCHER_WAIT_FAILED)
        return outcome

    @contextmanager
    def _upload_files(self, launch: MultiHostLaunch, rendezvous: Rendezvous) -> Iterator[None]:
        """Upload the files to all hosts, and listen for registrations. Until all ranks have registered, each host would remove the files
        again if this process died; from then on the ranks' agents do."""
        with connect_hosts([host.name for host in launch.hosts], self._stop_requests) as connections:
            ports = rendezvous.listen({each.controller_address for each in connections})
            token = JoinToken(
                secret=secrets.token_hex(32),
                controllers=[(each.controller_address, ports[each.controller_address]) for each in connections],
                hostnames=[each.hostname for each in connections],
                slots=[host.slots for host in launch.hosts],
                command=launch.command,
                environment=launch.forwarded,
            )
            self._remote_ranks = _remote_ranks(launch, token)
            rendezvous.admit(token, self._remote_ranks)
            files = {**launch.texts, JOIN_TOKEN_FILE: token.text()}
            on_every_host(connections, lambda each: each.upload(launch.folder, files), self._stop_requests)
            self._stack.callback((launch.folder / JOIN_TOKEN_FILE).unlink, missing_ok=True)
            yield

    def _start_launcher(self, launch: MultiHostLaunch) -> None:
        """Start the launcher under an agent of its own, so that it and its processes here die with this process."""
        for file in launch.files:
            _write(file)
        log, output = open_log_file(launch.folder / "ranks" / "launcher.log", "DeepSpeed's launcher")
        environment = {**launch.launcher.full_environment(launch.environment), "PYTHONSAFEPATH": "1"}
        self._launcher = start_under_agent(launch.launcher.argv, -1, log, output, environment, folder=launch.launcher.folder)
        self._stack.callback(self._launcher.close, LAUNCHER_WAIT)
        self._selector.register(self._launcher.fd, 1, self._read_launcher)

    def _read_launcher(self) -> None:
        self._launcher.read_messages()
        if self._launcher.outcome is not None:
            self._selector.unregister(self._launcher.fd)

    def _wait_for_registrations(self) -> None:
        """Wait until all ranks have registered; raises StartFailed if they do not, and SshInterrupted at a stop request."""
        since = time.monotonic()
        while not all(rank.is_registered for rank in self._remote_ranks):
            registered = len(self._ranks)
            self._poll()
            since = time.monotonic() if len(self._ranks) > registered else since
            if self._stop_requests:
                raise SshInterrupted(self._stop_requests[0][0])
            if lost := next((rank for rank in self._remote_ranks if rank.outcome is not None), None):
                says = f"rank {lost.rank} on {lost.where} was lost before all ranks had registered: {lost.problem}"
                raise StartFailed(Outcome(status=FAILED, ranks=(), rank=lost.rank, says=says, hosts=(_host(lost),)))
            missing = [rank for rank in self._remote_ranks if not rank.is_registered]
            if missing and (self._launcher.outcome or time.monotonic() > since + REGISTER_TIMEOUT):
                raise StartFailed(self._registration_failure(missing))

    def _registration_failure(self, missing: Sequence[RemoteRank]) -> Outcome:
        """Return the outcome when ranks have not registered. Their hosts are at fault, unless on every host some rank is missing."""
        when = "before DeepSpeed's launcher ended" if self._launcher.outcome else f"within {REGISTER_TIMEOUT:.0f} s"
        names = ", ".join(f"{rank.rank} on {rank.where}" for rank in missing[:4]) + (" and more" if len(missing) > 4 else "")
        says = f"rank {names} did not register {when}{_launcher_reason(self._launcher)}"
        incomplete = dict.fromkeys(map(_host, missing))
        hosts = tuple(incomplete) if set(map(_host, self._remote_ranks)) - set(incomplete) else ()
        return Outcome(status=FAILED, ranks=(), rank=missing[0].rank, says=says, log=self._launcher.log.path, hosts=hosts)

    def _poll(self) -> None:
        super()._poll()
        if self._launcher.outcome is None and self._launcher.is_orphan():
            self._read_launcher()
            if self._launcher.outcome is None:
                self._launcher.record_lost_agent()
                self._selector.unregister(self._launcher.fd)

    def _end_together(self) -> None:
        """End the ranks as Supervisor does. Also ask them to stop when the launcher dies first, and shorten the grace when one is lost."""
        if not self._stopping and self._kill_at is None and self._running_ranks() and (how := self._launcher_death()):
            self._show(f"DeepSpeed's launcher {how}: finishing the step and saving")
            self._request_stop()
        super()._end_together()
        if self._kill_at is not None and any(each.fate == "lost" for each in self._outcomes):
            self._kill_at = min(self._kill_at, time.monotonic() + LOST_GRACE)

    def _launcher_death(self) -> str:
        """Return how the launcher died while no rank had ended; "" if it lives."""
        if self._outcomes:
            return ""
        if (outcome := self._launcher.outcome) is not None:
            return f"was killed by {signal.Signals(-outcome.code).name}" if outcome.code < 0 else "was ended"
        orphan = next((rank for rank in self._remote_ranks if rank.launcher_died), None)
        return f"was killed on {_host(orphan)}" if orphan else ""

    @contextmanager
    def _send_heartbeats(self) -> Iterator[None]:
        """Send heartbeats to all ranks from a thread, so that a blocked terminal does not end a run."""
        over = threading.Event()

        def send_heartbeats() -> None:
            while not over.wait(HEARTBEAT_INTERVAL):
                for rank in self._remote_ranks:
                    rank.send_heartbeat()

        thread = threading.Thread(target=send_heartbeats, name="heartbeats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _wait_for_launcher(self, patience: float) -> None:
        """Wait until the launcher ends by itself, which it does once its children have ended, unless a host is cut off."""
        for rank in self._remote_ranks:
            rank.close(LAUNCHER_WAIT)
        deadline = time.monotonic() + patience
        while self._launcher.outcome is None and time.monotonic() < deadline:
            self._poll()


def _interrupted_outcome(number: int) -> Outcome:
    says = f"stopped by {signal.Signals(number).name} before the ranks had started"
    return Outcome(status=128 + number, ranks=(), says=says, stop_requested=True)


def _host(rank: RemoteRank) -> str:
    return rank.where.partition(" ")[0]


def _remote_ranks(launch: MultiHostLaunch, token: JoinToken) -> list[RemoteRank]:
    """Return the ranks that are to register."""
    ranks = []
    for rank in range(token.ranks):
        at, local_rank = token.host_and_local_rank(rank)
        host = launch.hosts[at]
        log = Path(f"{host.name}:{launch.folder / 'ranks' / f'{rank}.log'}")
        ranks.append(RemoteRank(rank, f"{host.name} (device {host.slots[local_rank]})", log))
    return ranks


def _meeting_address(ranks: Sequence[RemoteRank]) -> str:
    """Return where all ranks reach rank 0: the address from which it registered; if that is loopback, this machine's address."""
    first = ranks[0].address
    if first.startswith("127.") or first == "::1":
        return next((rank.controller_address for rank in ranks if rank.controller_address != ranks[0].controller_address), first)
    return first


def _launcher_reason(launcher: LocalRank) -> str:
    """Return why the launcher failed, from its log, in which pdsh puts the host before each line and mpirun puts advice between rules."""
    lines = [
        line.partition(": ")[2] if line.partition(": ")[0].isidentifier() else line for line in launcher.log.last_lines(SEARCHED_LINES)
    ]
    plain, advice = list[str](), list[str]()
    in_advice = False
    for line in lines:
        if MPIRUN_RULE.fullmatch(line):
            in_advice = not in_advice
        elif line and not LAUNCHER_LOG_LINE.match(line):
            (advice if in_advice else plain).append(line)
    reason = exception_line(lines) or (plain[-1] if plain else " ".join(advice))
    return f"{': ' if reason else ''}{' '.join(reason.split())[:400]}; the launcher's log is {launcher.log.path}"


def _write(file: LaunchFile) -> None:
    file.path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, file.mode), "w", encoding="utf-8") as text:
        text.write(file.text)
