"""Every child process is ended and waited for, however the code that started it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.time_limits import raise_after
from distrain.trainer.prove.fork_client import ForkServer
from distrain.trainer.system.child_process import end_child, start_child


class Interrupted(Exception):
    """Raised by a signal handler."""


def parents() -> dict[int, tuple[int, str]]:
    """Return the parent and the state of every process."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            found[int(stat.parent.name)] = (int(parent), state)
    return found


def children() -> set[int]:
    """Return this process's children, including zombies."""
    return {pid for pid, (parent, _) in parents().items() if parent == os.getpid()}


def descendants(pid: int) -> set[int]:
    """Return the children of a process, and theirs."""
    found, rows = {pid}, parents()
    while more := {child for child, (parent, _) in rows.items() if parent in found} - found:
        found |= more
    return found - {pid}


def until(condition: Callable[[], Any]) -> Any:
    """Return the condition's value once it is true."""
    deadline = time.monotonic() + DEADLINE
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


@pytest.mark.parametrize("ended", [True, False])
def test_a_child_whose_stdin_can_not_be_flushed_is_ended(ended: bool) -> None:
    before = children()
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(b"text")
    if ended:
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    end_child(child)
    assert children() <= before
    assert child.returncode == -signal.SIGKILL
    assert all(pipe is not None and pipe.closed for pipe in (child.stdin, child.stdout, child.stderr))


def test_a_child_that_has_already_ended_keeps_its_status() -> None:
    child = subprocess.Popen(["false"])
    child.wait()
    end_child(child)
    assert child.returncode == 1


def test_the_fork_server_ends_if_the_wait_for_it_is_interrupted(tmp_path: Path) -> None:
    before = children()
    server = ForkServer(tmp_path / "log", command=["sleep", "1000"])
    with pytest.raises(Interrupted), raise_after(0.2, Interrupted):
        server.close()
    assert children() <= before


def test_a_fork_server_that_was_killed_with_unsent_requests_is_reaped(tmp_path: Path) -> None:
    before = children()
    with ForkServer(tmp_path / "log", command=["sleep", "1000"]) as server:
        child = server._child
        assert child.stdin is not None
        child.stdin.write("text")
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert children() <= before


@pytest.fixture
def python_interrupt() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, as in a program that a user runs."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("python_interrupt")
def test_the_processes_of_the_doctor_end_if_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    from distrain.trainer.loop.offline import doctor

    def interrupt_parent(rank: int, port: int) -> None:
        if rank == 1:
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(1000)

    before = children()
    monkeypatch.setattr(doctor, "_join_and_add", interrupt_parent)
    with pytest.raises(KeyboardInterrupt):
        doctor.gloo_fault()
    assert children() <= before


@pytest.mark.usefixtures("python_interrupt")
def test_an_interrupt_while_the_doctor_forks_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python prints and ignores what a signal's handler raises within `os.fork`, as in logging's own callback there."""
    from distrain.trainer.loop.offline import doctor

    due = [signal.SIGINT]
    os.register_at_fork(before=lambda: signal.raise_signal(due.pop()) if due else None)
    before = children()
    monkeypatch.setattr(doctor, "_join_and_add", lambda rank, port: time.sleep(1000))
    with pytest.raises(KeyboardInterrupt), raise_after(DEADLINE, Interrupted):
        doctor.gloo_fault()
    assert children() <= before


def test_processes_that_measure_the_machine_end_with_their_parent(tmp_path: Path) -> None:
    """As at its deadline: the parent alone is killed. They are the manager of a barrier and at least two that measure."""
    own = {**os.environ, "TMPDIR": str(tmp_path)}
    probe = subprocess.Popen([sys.executable, "-m", "distrain.trainer.machine.probe"], stdout=subprocess.DEVNULL, env=own)
    try:
        workers = until(lambda: probe.poll() is not None or (len(found := descendants(probe.pid)) >= 3 and found))
        assert probe.poll() is None
    finally:
        end_child(probe)
    until(lambda: not {pid for pid in workers if parents().get(pid, (0, "Z"))[1] not in "ZX"})


def test_a_child_and_its_children_end_with_the_block() -> None:
    program = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); time.sleep(1000)"
    before = children()
    with start_child(["-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
    assert children() <= before
    assert child.returncode == -signal.SIGKILL
    until(lambda: parents().get(grandchild, (0, "Z"))[1] in "ZX")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_verb_that_is_asked_to_stop_ends_its_child_first(number: int, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    arguments = ["export", str(tmp_path / "run"), str(tmp_path / "out")]
    process = subprocess.Popen([sys.executable, "-m", "distrain", *arguments], stderr=subprocess.PIPE, text=True)
    try:
        (child,) = until(lambda: descendants(process.pid))
        process.send_signal(number)
        assert process.wait(DEADLINE) == 128 + number
        assert not Path(f"/proc/{child}").exists()
    finally:
        end_child(process)
