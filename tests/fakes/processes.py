"""Processes of this machine, as /proc lists them: those with a variable in their environment, and those that another one started."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from distrain.tests.fakes.deadline import DEADLINE


def marked_processes(name: str, value: object) -> dict[int, str]:
    """Return the processes whose environment has NAME=VALUE: their command lines by their ids."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if f"{name}={value}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "cmdline").read_bytes().decode(errors="replace")
    return found


def parents_of_processes() -> dict[int, int]:
    """Return the id of each process's parent by its own, zombies included."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return parents


def children(pid: int) -> set[int]:
    """Return the children of a process, zombies included."""
    return {child for child, parent in parents_of_processes().items() if parent == pid}


def descendants(pid: int) -> set[int]:
    """Return the children of a process, and their children."""
    parents, found = parents_of_processes(), {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def alive(pids: set[int]) -> set[int]:
    """Return those of the processes that still run."""
    running = set()
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                running.add(pid)
    return running


def until(met: Any) -> Any:
    """Wait until a condition holds and return its value; fail at the deadline."""
    deadline = time.monotonic() + DEADLINE
    while not (found := met()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found
