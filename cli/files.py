"""The files of RUN_DIR that the command line writes: there whole or not at all."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from ..trainer.launch import whole
from ..trainer.plan.result import Plan
from ..trainer.spec.plain_file import read_plain
from ..trainer.spec.run import Run

MOST_BYTES = 4 << 30  # of a manifest


def put(file: Path, what: object) -> None:
    """A file of JSON; raises OSError where it stays as it was."""
    from msgspec import json

    whole.put(file, json.format(json.encode(what)))


def write(run: Run, plan: Plan, folder: Path) -> None:
    """RUN_DIR/run.json, which ranks read, and plan.json, the plan that they are held against; raises OSError."""
    put(folder / "run.json", run)
    put(folder / "plan.json", plan)


def saved_steps(folder: Path) -> list[int]:
    """The steps that RUN_DIR has a checkpoint's folder of, rising."""
    with suppress(OSError):
        names = os.listdir(folder / "checkpoints")
        return sorted(int(name[5:]) for name in names if re.fullmatch(r"step_(0|[1-9][0-9]*)", name))
    return []


def standing(folder: Path) -> int | None:
    """The step of RUN_DIR's newest checkpoint whose files are there with their sizes; None where there is none."""
    from msgspec import DecodeError, json

    for step in reversed(saved_steps(folder)):
        path = folder / "checkpoints" / f"step_{step}"
        with suppress(OSError, DecodeError, KeyError, TypeError, AttributeError, RecursionError):
            files = json.decode(read_plain(path / "manifest.json", MOST_BYTES))["files"]
            if all((path / name).stat().st_size == file["bytes"] for name, file in files.items()):
                return step
    return None
