"""The files of RUN_DIR that the command line writes: there whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..plan.result import Plan
from ..spec.run import Run
from ..system import atomic_file
from .paths import whole_paths

WRITTEN = ("run.json", "plan.json")
END = "ended.json"


def put(file: Path, what: object) -> None:
    """A file of JSON; raises OSError where it stays as it was."""
    from msgspec import json

    atomic_file.put(file, json.format(json.encode(what)))


def write(run: Run, plan: Plan, folder: Path) -> None:
    """RUN_DIR/run.json, which ranks read, its paths whole, and plan.json, the plan that they are held against; raises OSError."""
    for name, what in zip(WRITTEN, (whole_paths(run), plan), strict=True):
        put(folder / name, what)


def write_end(folder: Path, status: int, says: str) -> None:
    """RUN_DIR/ended.json: how the last `fit` in it ended, its exit status and what it said; left out where the disk is full."""
    with suppress(OSError):
        put(folder / END, {"status": status, "says": says})


def remove_end(folder: Path) -> None:
    """Take RUN_DIR/ended.json away: another `fit` begins."""
    with suppress(OSError):
        (folder / END).unlink()


def read(folder: Path) -> dict[str, bytes]:
    """The files that a launch writes, as they are now; those that are not there are left out."""
    found = {}
    for name in (*WRITTEN, END):
        with suppress(OSError):
            found[name] = (folder / name).read_bytes()
    return found


def put_back(before: Mapping[str, bytes], folder: Path) -> None:
    """Make the files that a launch wrote what they were before: a run that was refused changes nothing."""
    for name in (*WRITTEN, END):
        with suppress(OSError):  # of a disk that is full: a checkpoint names its own run
            if name in before:
                atomic_file.put(folder / name, before[name])
            else:
                (folder / name).unlink(missing_ok=True)
