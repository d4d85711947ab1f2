"""The files of RUN_DIR that the command line writes: there whole or not at all."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ..trainer.launch import whole
from ..trainer.plan.result import Plan
from ..trainer.spec.run import Run

END = "ended.json"


def put(file: Path, what: object) -> None:
    """A file of JSON; raises OSError where it stays as it was."""
    from msgspec import json

    whole.put(file, json.format(json.encode(what)))


def write(run: Run, plan: Plan, folder: Path) -> None:
    """RUN_DIR/run.json, which ranks read, and plan.json, the plan that they are held against; raises OSError."""
    put(folder / "run.json", run)
    put(folder / "plan.json", plan)


def write_end(folder: Path, status: int, says: str) -> None:
    """RUN_DIR/ended.json: how the last `fit` in it ended, its exit status and what it said; left out where the disk is full."""
    with suppress(OSError):
        put(folder / END, {"status": status, "says": says})


def remove_end(folder: Path) -> None:
    """Take RUN_DIR/ended.json away: another `fit` begins."""
    with suppress(OSError):
        (folder / END).unlink()


def standing(folder: Path) -> int | None:
    """The step of RUN_DIR's newest checkpoint whose files are there with their sizes; None where there is none."""
    from msgspec import DecodeError, json

    found = [int(path.name[5:]) for path in folder.glob("checkpoints/step_*") if path.name[5:].isdigit()]
    for step in sorted(found, reverse=True):
        path = folder / "checkpoints" / f"step_{step}"
        with suppress(OSError, DecodeError, KeyError, TypeError, AttributeError):
            files = json.decode((path / "manifest.json").read_bytes())["files"]
            if all((path / name).stat().st_size == file["bytes"] for name, file in files.items()):
                return step
    return None
