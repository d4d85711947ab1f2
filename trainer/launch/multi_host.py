"""Starting a run's ranks on several hosts through DeepSpeed's launcher, of which nothing is wanted but that it starts them.

The head writes the run's files on each host over ssh (upload_remote.py), listens where the hosts reach it (door.py), and starts the
launcher. Each slot's process (guest.py) comes to the head with the ticket that it finds on its host; when all are there the
head has the ranks started. From then on it hears and tells them over their keepers' sockets (tether.py), and what they say is
the run's record: how the launcher ends says nothing of it. The processes are

    head:  distrain fit -> the launcher's keeper -> deepspeed.launcher.runner -> pdsh -> ssh to each host
    host:  sshd -> deepspeed.launcher.launch -> guest a slot;    a rank's keeper -> the rank

(with launch.runner=openmpi mpirun in place of pdsh, and on hosts its daemon orted in place of launch, on the head's own mpirun itself;
with launch.runner=slurm srun in place of pdsh, and slurmstepd in place of launch)
and what dies is missed by those beside it: the head by the launcher's keeper and the ranks', a keeper by the head, the guest
and the rank, which dies with it, the launcher by the guest and the head, a guest by its keeper.
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
from .agent.remote_agent import PING
from .agent.token import NAME, Ticket
from .commands.deepspeed import Command, File
from .hosts.hostfile import Host
from .hosts.ssh import Stopped
from .hosts.upload import Unreachable, land, on_each
from .rank.channel import hush
from .rank.log import opened, raised
from .single_host import signals
from .supervisor.local_rank import Member, under_keeper
from .supervisor.outcome import FAILED, LOOKED_AT, Ended
from .supervisor.remote_rank import Remote
from .supervisor.rendezvous import Door
from .supervisor.supervisor import Crew, Show
from .supervisor.watchdog import Watchdog

COME = 300.0  # seconds for the first slot to come, and for another after the last one
PART = 8.0  # seconds for the launcher to end by itself after its last rank
PART_BADLY = 2.0  # after a run that failed
RULE = re.compile(r"-{9,}")
TOLD = re.compile(r"\[.*\] \[(INFO|WARNING)\] ")  # what DeepSpeed's launcher says of each start
LOST = 1.0  # seconds that ranks have after another was lost: none can finish its step


@dataclass(frozen=True, kw_only=True)
class Start:
    """What is started, and where: `launcher` starts a guest a slot of the hosts, each of which runs `command` as a rank."""

    hosts: Sequence[Host]
    folder: Path  # RUN_DIR
    launcher: Command
    files: Sequence[File]  # that the launcher reads
    texts: Mapping[str, str]  # that ranks read, by their names in RUN_DIR
    command: Sequence[str]
    environment: Mapping[str, str]  # of this process
    handed: Mapping[str, str]  # of it, what ranks have too
    address: str | None = None  # where ranks meet; None: where rank 0 comes from
    port: int | None = None  # there; None: one that is free


def launch_hosts(
    start: Start,
    *,
    show: Show,
    grace: float,
    live: Show | None = None,
    watchdog: Watchdog | None = None,
    began: Callable[[int], None] | None = None,
    asked: list[tuple[int, float]] | None = None,
) -> Ended:
    """Run the ranks until all have ended, and say how: what `launch.launch` is for one machine."""
    with signals(asked) as told, _not_stopped(), ExitStack() as stack:
        crew = HostCrew(told, stack, show=show, live=live or hush, grace=grace, watchdog=watchdog or Watchdog(), began=began)
        try:
            return crew.launched(start)
        except Unreachable as error:
            return Ended(status=FAILED, ranks=(), says=str(error), hosts=error.hosts)
        except OSError as error:
            return Ended(status=FAILED, ranks=(), says=f"can't be started: {error}")


@contextmanager
def _not_stopped() -> Iterator[None]:
    """Ctrl-Z does nothing: a head that is stopped has gone, for its ranks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)


class Unstarted(Exception):
    """A start to which not all ranks came, and how it ended."""

    def __init__(self, ended: Ended) -> None:
        super().__init__(ended.says)
        self.ended = ended


class HostCrew(Crew):
    """Ranks that come over the network, and the launcher that has them come."""

    _launcher: Member
    _remotes: Sequence[Remote] = ()

    def launched(self, start: Start) -> Ended:
        """Write the files, start the launcher, wait for all ranks to come, and stay until all have ended."""
        if few := open_files.allowed(open_files.held(sum(len(host.slots) for host in start.hosts), len(start.hosts))):
            return Ended(status=FAILED, ranks=(), says=str(few))
        with Door(self._ears, self.take) as door, self._pulse():
            try:
                with self._landed(start, door):
                    self._start_launcher(start)
                    self._gather()
            except Stopped as error:
                return _stopped(error.number)
            except Unstarted as error:
                return error.ended
            door.close()
            for remote in self._remotes:
                remote.go(start.address or _meeting(self._remotes), start.port or self._remotes[0].port)
            ended = self.run()
        self._part(PART if ended.status != FAILED else PART_BADLY)
        return ended

    @contextmanager
    def _landed(self, start: Start, door: Door) -> Iterator[None]:
        """Write the files on all hosts, and open the door to who reads them. Until all ranks have come each host would remove them again
        if this process died; from then on the ranks' keepers do."""
        with land([host.name for host in start.hosts], self._asked) as landed:
            ports = door.open({each.head for each in landed})
            doors, names = [(each.head, ports[each.head]) for each in landed], [each.calls for each in landed]
            slots = [host.slots for host in start.hosts]
            token = secrets.token_hex(32)
            ticket = Ticket(token=token, doors=doors, names=names, slots=slots, command=start.command, environment=start.handed)
            self._remotes = _seats(start, ticket)
            door.admit(ticket, self._remotes)
            on_each(landed, lambda each: each.lay(start.folder, {**start.texts, NAME: ticket.written()}), self._asked)
            self._stack.callback((start.folder / NAME).unlink, missing_ok=True)
            yield

    def _start_launcher(self, start: Start) -> None:
        """Under a keeper of its own, so that it dies with this process, and all that it started here."""
        for file in start.files:
            _write(file)
        log, output = opened(start.folder / "ranks" / "launcher.log", "DeepSpeed's launcher")
        surroundings = {**start.launcher.surroundings(start.environment), "PYTHONSAFEPATH": "1"}
        self._launcher = under_keeper(start.launcher.words, -1, log, output, surroundings, folder=start.launcher.folder)
        self._stack.callback(self._launcher.close, PART)
        self._ears.register(self._launcher.control, 1, self._hear_launcher)

    def _hear_launcher(self) -> None:
        for _ in self._launcher.hear():
            pass
        if self._launcher.end is not None:
            self._ears.unregister(self._launcher.control)

    def _gather(self) -> None:
        """Wait until all ranks are there; raises Unstarted where they don't come, and Stopped."""
        since = time.monotonic()
        while not all(remote.here for remote in self._remotes):
            here = len(self._members)
            self._listen()
            since = time.monotonic() if len(self._members) > here else since
            if self._asked:
                raise Stopped(self._asked[0][0])
            if lost := next((remote for remote in self._remotes if remote.end is not None), None):
                says = f"rank {lost.rank} on {lost.where} was lost before all had come: {lost.problem}"
                raise Unstarted(Ended(status=FAILED, ranks=(), rank=lost.rank, says=says, hosts=(_host(lost),)))
            missing = [remote for remote in self._remotes if not remote.here]
            if missing and (self._launcher.end or time.monotonic() > since + COME):
                raise Unstarted(self._not_brought(missing, "before it ended" if self._launcher.end else f"within {COME:.0f} s"))

    def _not_brought(self, missing: Sequence[Remote], when: str) -> Ended:
        """A start to which ranks did not come. At fault are their hosts, unless none has brought all of its ranks."""
        names = ", ".join(f"{remote.rank} on {remote.where}" for remote in missing[:4]) + (" and more" if len(missing) > 4 else "")
        says = f"DeepSpeed's launcher did not bring rank {names} {when}{_last_words(self._launcher)}"
        lacking = dict.fromkeys(map(_host, missing))
        hosts = tuple(lacking) if set(map(_host, self._remotes)) - set(lacking) else ()
        return Ended(status=FAILED, ranks=(), rank=missing[0].rank, says=says, log=self._launcher.log.path, hosts=hosts)

    def _listen(self) -> None:
        super()._listen()
        if self._launcher.end is None and self._launcher.is_orphan():
            self._hear_launcher()
            if self._launcher.end is None:
                self._launcher.lose()
                self._ears.unregister(self._launcher.control)

    def _end_together(self) -> None:
        """As any crew. When the launcher dies before all of its ranks they save and stop, and when a rank is lost none can do that."""
        if not self._stopping and self._kill_at is None and self._left() and (dead := self._dead_launcher()):
            self._show(f"DeepSpeed's launcher {dead}: finishing the step and saving")
            self._stop()
        super()._end_together()
        if self._kill_at is not None and any(end.fate == "lost" for end in self._ends):
            self._kill_at = min(self._kill_at, time.monotonic() + LOST)

    def _dead_launcher(self) -> str:
        """How it died, while no rank had ended; "" where it lives."""
        if self._ends:
            return ""
        if (end := self._launcher.end) is not None:
            return f"was killed by {signal.Signals(-end.code).name}" if end.code < 0 else "was ended"
        orphan = next((remote for remote in self._remotes if remote.orphan), None)
        return f"was killed on {orphan.where.partition(' ')[0]}" if orphan else ""

    @contextmanager
    def _pulse(self) -> Iterator[None]:
        """Ping all ranks from a thread, so that a terminal that is stopped stops no run."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(PING):
                for remote in self._remotes:
                    remote.ping()

        thread = threading.Thread(target=beat, name="pulse", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _part(self, patience: float) -> None:
        """Let the launcher end by itself, which it does when its children have; where a host is cut off it can't."""
        for remote in self._remotes:
            remote.close(PART)
        until = time.monotonic() + patience
        while self._launcher.end is None and time.monotonic() < until:
            self._listen()


def _stopped(number: int) -> Ended:
    return Ended(status=128 + number, ranks=(), says=f"stopped by {signal.Signals(number).name} before the ranks had started", asked=True)


def _host(remote: Remote) -> str:
    return remote.where.partition(" ")[0]


def _seats(start: Start, ticket: Ticket) -> list[Remote]:
    """The ranks that are to come."""
    seats = []
    for rank in range(ticket.ranks):
        at, local = ticket.seat(rank)
        host = start.hosts[at]
        log = Path(f"{host.name}:{start.folder / 'ranks' / f'{rank}.log'}")
        seats.append(Remote(rank, f"{host.name} (device {host.slots[local]})", log))
    return seats


def _meeting(remotes: Sequence[Remote]) -> str:
    """Where all ranks reach rank 0: from where it came; if that is this machine itself, where others come to it."""
    first = remotes[0].address
    if first.startswith("127.") or first == "::1":
        return next((remote.door for remote in remotes if remote.door != remotes[0].door), first)
    return first


def _last_words(launcher: Member) -> str:
    """Why the launcher did not do it, by its log, in which pdsh puts the host before each line, and mpirun its advice between rules."""
    lines = [line.partition(": ")[2] if line.partition(": ")[0].isidentifier() else line for line in launcher.log.last_lines(LOOKED_AT)]
    plain, advice = list[str](), list[str]()
    ruled = False
    for line in lines:
        if RULE.fullmatch(line):
            ruled = not ruled
        elif line and not TOLD.match(line):
            (advice if ruled else plain).append(line)
    said = raised(lines) or (plain[-1] if plain else " ".join(advice))
    return f"{': ' if said else ''}{' '.join(said.split())[:400]}; its log is {launcher.log.path}"


def _write(file: File) -> None:
    file.path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, file.mode), "w", encoding="utf-8") as text:
        text.write(file.text)
