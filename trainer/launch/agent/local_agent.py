"""One rank's keeper: a small process that starts the rank, passes signals on to it, and leaves nothing of it behind.

It is run by path, as `python -I -S local_agent.py LIFELINE CONTROL COMMAND ...`, and so imports nothing of this package. The
tree is launching process -> keeper -> rank, each in a session of its own, because no other shape ends everything:

- the launching process dies, however: the lifeline (a pipe whose write end it alone holds) ends, and the keeper kills the
  rank's group. The rank might be stopped or deaf at that time; the keeper never is.
- the rank dies: what it started goes with it. The keeper is the reaper of orphans (PR_SET_CHILD_SUBREAPER), so that this
  holds for processes that left the rank's group too.
- the keeper dies: the kernel kills the rank (PR_SET_PDEATHSIG), and the launching process what the rank started (strays.py).

A rank with PR_SET_PDEATHSIG alone would die before it could end its own children.

A program that finishes what it is at when it is asked to stop is not there to hear it while it is being loaded, which takes
torch seconds. Those of DEFERRING are started with STOPS held back: what comes meanwhile they get when they let it come (stop.py).

SPARED are processes that a launcher starts on this very machine, as mpirun does: they hang on a socket to the head (tether.py), and
have a rank that is to save when its launcher dies.

The last line of the control pipe is the keeper's: {"ended": exit status, or minus a signal}.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterator

PDEATHSIG, CHILD_SUBREAPER = 1, 36  # prctl(2)
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
STOPS = (signal.SIGTERM, signal.SIGINT)
DEFERRING = frozenset({"distrain.trainer.loop.rank"})  # words of a command
SPARED = (b"distrain.trainer.launch.agent.bootstrap", b"/trainer/launch/agent/bootstrap_srun.py")  # in a command line
PATIENCE = 5.0  # seconds for orphans to die of SIGKILL
CANNOT_START = 127  # the exit status that shells give a command that isn't there


def main(words: list[str]) -> None:
    """Start the command and stay until it has ended, or until the lifeline does."""
    lifeline, control, command = int(words[0]), int(words[1]), words[2:]
    woken = ready()
    rank = start(command)
    ended = _wait(rank, lifeline, woken)
    _tell(control, clear(rank, ended))


def ready() -> int:
    """Make this process the reaper of orphans; what can be read when a signal has come, a child's end among them."""
    _prctl(CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    return woken


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Signals to this process wait; those to what is started meanwhile, until that process lets them come."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start(command: list[str]) -> int:
    """Fork and exec; its process id. No signal is lost: one that came before stays pending until someone can take it."""
    keeper = os.getpid()
    signal.pthread_sigmask(signal.SIG_SETMASK, {*FORWARDED, signal.SIGCHLD})
    rank = os.fork()
    if rank == 0:
        _become(command, keeper)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # for set_wakeup_fd alone
    for each in FORWARDED:
        signal.signal(each, lambda number, _: forward(rank, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return rank


def _become(command: list[str], keeper: int) -> None:
    """Turn this forked process into the rank."""
    try:
        os.setsid()
        for each in (*FORWARDED, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(each, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until it can write its stacks
        signal.set_wakeup_fd(-1)
        _prctl(PDEATHSIG, signal.SIGKILL)
        if os.getppid() == keeper:  # else it died before the kernel was told
            signal.pthread_sigmask(signal.SIG_SETMASK, () if DEFERRING.isdisjoint(command) else STOPS)
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"can't start {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(CANNOT_START)


def forward(rank: int, number: int) -> None:
    """Send a signal to the rank, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank, number)


def _wait(rank: int, lifeline: int, woken: int) -> int | None:
    """The rank's status when it has ended, or None when the lifeline has."""
    watched = select.poll()
    watched.register(lifeline, select.POLLIN)
    watched.register(woken, select.POLLIN)
    while (ended := reap(rank)) is None:
        ready = {fd for fd, _ in watched.poll()}
        if lifeline in ready and not os.read(lifeline, 512):
            return None
        if woken in ready:
            os.read(woken, 512)
    return ended


def reap(rank: int) -> int | None:
    """The rank's status once it has ended; orphans of the rank's are reaped on the way."""
    while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
        if ended[0] == rank:
            return ended[1]
    return None


def clear(rank: int, ended: int | None) -> int:
    """Kill what is left of the rank and its descendants; the rank's exit status, or minus the signal that killed it."""
    for each in FORWARDED:
        signal.signal(each, signal.SIG_IGN)  # its id may soon be another's
    if ended is None:
        forward(rank, signal.SIGKILL)  # by itself, for it may not have got as far as a group of its own
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank, signal.SIGKILL)
    status = os.waitpid(rank, 0)[1] if ended is None else ended
    until = time.monotonic() + PATIENCE
    while (orphans := [child for child in _children() if not spared(child)]) and time.monotonic() < until:
        for orphan in orphans:
            os.kill(orphan, signal.SIGKILL)
        time.sleep(0.005)
        for orphan in orphans:
            os.waitpid(orphan, os.WNOHANG)
    return os.waitstatus_to_exitcode(status)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as listed:
            return [int(pid) for pid in listed.read().split()]
    except OSError:
        return []  # not Linux, or a kernel without this file: the group was all that could be named


def spared(process: int) -> bool:
    """Whether a process ends by itself when it should, and not before."""
    try:
        with open(f"/proc/{process}/cmdline", "rb") as words:
            said = words.read()
            return any(word in said for word in SPARED)
    except OSError:
        return False


def _tell(control: int, code: int) -> None:
    """One line, apart from any half line that the rank left."""
    with contextlib.suppress(OSError):  # the launching process is gone
        os.write(control, f'\n{{"ended": {code}}}\n'.encode())


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value))


if __name__ == "__main__":
    main(sys.argv[1:])
