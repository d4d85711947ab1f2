"""The agent of one rank: a small process that starts the rank, forwards signals to it, and leaves no process of it behind.

It runs by path, as `python -I -S pipe_agent.py PARENT_PIPE CONTROL_PIPE COMMAND ...`, and so imports nothing of this package. The tree
is controller -> agent -> rank, each in a session of its own. With this tree everything ends when one of them dies:

- The controller dies, by any cause: only it holds the write end of the parent-death pipe, so the pipe ends, and the agent kills the
  rank's group. This also works while the rank is stopped or ignores signals.
- The rank dies: the processes that it started are killed. The agent adopts orphans (PR_SET_CHILD_SUBREAPER), so this includes
  processes that left the rank's group.
- The agent dies: the kernel kills the rank (PR_SET_PDEATHSIG), and the controller kills what the rank started (orphans.py).

A rank with PR_SET_PDEATHSIG alone would die before it could end its own children.

A rank can't handle a stop request while it loads torch, which takes seconds. Hence the modules in DEFERRING are started with
DEFERRED_SIGNALS blocked: those that arrive meanwhile are delivered when the module unblocks them (system/stop_requests.py).

Processes whose command lines contain one of SPARED are not killed: a launcher such as mpirun starts bootstraps on this very machine. They
end with their socket to the controller (socket_agent.py), and their rank must be able to save when the launcher dies.

The last line in the control pipe is the agent's: {"ended": exit status, or minus a signal}.
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
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGURG)
DEFERRED_SIGNALS = (signal.SIGTERM, signal.SIGINT)
DEFERRING = frozenset({"distrain.trainer.loop.rank"})  # arguments of a command
SPARED = (b"distrain.trainer.launch.agent.bootstrap", b"/trainer/launch/agent/bootstrap_srun.py")
PATIENCE = 5.0  # seconds for orphans to die of SIGKILL
CANNOT_START = 127  # the exit status that shells give a command that does not exist


def main(arguments: list[str]) -> None:
    """Start the command and stay until it or the controller has ended."""
    parent_pipe, control_pipe, command = int(arguments[0]), int(arguments[1]), arguments[2:]
    wakeup = become_reaper()
    rank = start_rank(command)
    status = _wait(rank, parent_pipe, wakeup)
    _report_end(control_pipe, end_rank(rank, status))


def become_reaper() -> int:
    """Make this process adopt orphans; return a pipe that becomes readable at every signal, including a child's end."""
    _prctl(CHILD_SUBREAPER, 1)
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    return read_end


@contextlib.contextmanager
def block_signals() -> Iterator[None]:
    """Block FORWARDED in this process, and in processes that it starts in the block until they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_rank(command: list[str]) -> int:
    """Fork and execute the command; return its process id. No signal is lost: one that came before stays pending until it is handled."""
    agent = os.getpid()
    signal.pthread_sigmask(signal.SIG_SETMASK, {*FORWARDED, signal.SIGCHLD})
    rank = os.fork()
    if rank == 0:
        _execute(command, agent)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # only for set_wakeup_fd
    for each in FORWARDED:
        signal.signal(each, lambda number, _: send_signal(rank, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return rank


def _execute(command: list[str], agent: int) -> None:
    """Turn this forked process into the rank."""
    try:
        os.setsid()
        for each in (*FORWARDED, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(each, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until it can write its stacks
        signal.set_wakeup_fd(-1)
        _prctl(PDEATHSIG, signal.SIGKILL)
        if os.getppid() == agent:  # otherwise the agent died before prctl was called
            signal.pthread_sigmask(signal.SIG_SETMASK, () if DEFERRING.isdisjoint(command) else DEFERRED_SIGNALS)
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"can't start {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(CANNOT_START)


def send_signal(rank: int, number: int) -> None:
    """Send a signal to the rank if it exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank, number)


def _wait(rank: int, parent_pipe: int, wakeup: int) -> int | None:
    """Return the rank's wait status when it has ended, or None when the controller has ended first."""
    poll = select.poll()
    poll.register(parent_pipe, select.POLLIN)
    poll.register(wakeup, select.POLLIN)
    while (status := reap(rank)) is None:
        readable = {fd for fd, _ in poll.poll()}
        if parent_pipe in readable and not os.read(parent_pipe, 512):
            return None
        if wakeup in readable:
            os.read(wakeup, 512)
    return status


def reap(rank: int) -> int | None:
    """Reap the children that have ended, including adopted orphans; return the rank's wait status if it is among them."""
    while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
        if ended[0] == rank:
            return ended[1]
    return None


def end_rank(rank: int, status: int | None) -> int:
    """Kill the rank and its descendants; return the rank's exit status, or minus the signal that killed it.

    `status` is its wait status if it has ended already.
    """
    for each in FORWARDED:
        signal.signal(each, signal.SIG_IGN)  # the rank's process id may soon be another process's
    if status is None:
        send_signal(rank, signal.SIGKILL)  # directly, because it may not have made a group of its own yet
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank, signal.SIGKILL)
    status = os.waitpid(rank, 0)[1] if status is None else status
    deadline = time.monotonic() + PATIENCE
    while (orphans := [child for child in _children() if not is_spared(child)]) and time.monotonic() < deadline:
        for orphan in orphans:
            os.kill(orphan, signal.SIGKILL)
        time.sleep(0.005)
        for orphan in orphans:
            os.waitpid(orphan, os.WNOHANG)
    return os.waitstatus_to_exitcode(status)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []  # not Linux, or a kernel without this file: only the group can be killed


def is_spared(process: int) -> bool:
    """Return whether a process is in SPARED: it is not killed, because it ends by itself."""
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            command_line = file.read()
            return any(part in command_line for part in SPARED)
    except OSError:
        return False


def _report_end(control_pipe: int, code: int) -> None:
    """Write one line, separate from any unfinished line of the rank."""
    with contextlib.suppress(OSError):  # the controller is gone
        os.write(control_pipe, f'\n{{"ended": {code}}}\n'.encode())


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value))


if __name__ == "__main__":
    main(sys.argv[1:])
