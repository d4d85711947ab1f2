"""The files of RUN_DIR that the command line writes: there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..plan.result import Plan
from ..spec.plain_file import expand_home
from ..spec.problem import Problem, Unreadable
from ..spec.run import Run
from ..system import atomic_file
from .paths import whole_paths

LAUNCH_FILES = ("run.json", "plan.json")
OUTCOME_FILE = "ended.json"


def write_json(file: Path, what: object) -> None:
    """A file of JSON; raises OSError where it stays as it was."""
    from msgspec import json

    atomic_file.write_atomically(file, json.format(json.encode(what)))


def write_launch_files(run: Run, plan: Plan, folder: Path) -> None:
    """RUN_DIR/run.json, which ranks read, its paths whole, and plan.json, the plan that they are held against; raises OSError."""
    for name, what in zip(LAUNCH_FILES, (whole_paths(run), plan), strict=True):
        write_json(folder / name, what)


def write_outcome(folder: Path, status: int, says: str) -> None:
    """RUN_DIR/ended.json: how the last `fit` in it ended, its exit status and what it said; left out where the disk is full."""
    with suppress(OSError):
        write_json(folder / OUTCOME_FILE, {"status": status, "says": says})


def remove_outcome(folder: Path) -> None:
    """Take RUN_DIR/ended.json away: another `fit` begins."""
    with suppress(OSError):
        (folder / OUTCOME_FILE).unlink()


def read_launch_files(folder: Path) -> dict[str, bytes]:
    """The files that a launch writes, as they are now; those that are not there are left out."""
    found = {}
    for name in (*LAUNCH_FILES, OUTCOME_FILE):
        with suppress(OSError):
            found[name] = (folder / name).read_bytes()
    return found


def restore_launch_files(before: Mapping[str, bytes], folder: Path) -> None:
    """Make the files that a launch wrote what they were before: a run that was refused changes nothing."""
    for name in (*LAUNCH_FILES, OUTCOME_FILE):
        with suppress(OSError):  # of a disk that is full: a checkpoint names its own run
            if name in before:
                atomic_file.write_atomically(folder / name, before[name])
            else:
                (folder / name).unlink(missing_ok=True)


def find_run_folder(folder: Path) -> Path:
    """RUN_DIR as a whole path; raises Unreadable where it is no run's folder."""
    path = expand_home(folder).absolute()
    if os.path.isfile(path / "run.json") or any(name.startswith("step_") for name in _names(path / "checkpoints")):
        return path
    there = os.path.isdir(path)
    inside = [name for name in _names(path) if os.path.isfile(path / name / "run.json")] if there else []
    says = f"{folder} holds no run.json" if there else f"{folder} is no folder"
    if os.path.lexists(path / "run.json"):
        says = f"{folder / 'run.json'} is no plain file"
    mend = f"did you mean {folder / inside[-1]}?" if inside else "give the folder of a run, such as runs/quickstart"
    raise Unreadable([Problem(rule="folder", says=says, mend=mend)])


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def run_folder(run: Run) -> Path:
    """RUN_DIR: one folder a run, under log.dir by its name."""
    return expand_home(run.log.dir).absolute() / run.name
