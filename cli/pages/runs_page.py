"""`distrain ls runs`: the run folders below a folder, how far each is, and its state."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import ceil, isfinite
from pathlib import Path
from typing import Any, Literal

from ...trainer.rundir.checkpoints import newest_saved
from ...trainer.rundir.files import END
from ...trainer.rundir.lock import NAME as LOCK
from ...trainer.rundir.lock import holder
from ...trainer.spec.problem import Problem, Unreadable
from ..verbs.ls import RUNS
from .format import many, one_line, table, width, wrapped

State = Literal["running", "finished", "stopped", "failed", "new", "damaged"]

MARKS = ("run.json", "plan.json", "metrics.jsonl")  # any of them, or a checkpoint, makes a folder a run's
DEEPEST = 3  # folders below the one that is listed: a run's name may have slashes
PROOFS = ".prove"  # how the folders of `distrain prove` end, whose runs are its own
READ = 16 << 20  # bytes of metrics.jsonl that are read, from its end
NEWER = 2.0  # seconds by which metrics.jsonl may be newer than the end that was written after it


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run folder: steps done and asked for, the last losses, the newest whole checkpoint's step, when it last wrote, its state."""

    folder: Path
    name: str
    steps: int
    of: int | None
    loss: float | None
    validation: float | None
    checkpoint: int | None
    when: float  # seconds since 1970
    state: State
    says: str  # why it failed, or what of the folder is damaged


def listed_runs(folder: Path | None) -> list[ListedRun]:
    """The runs below a folder (`runs`, which need not be there), the newest first; raises Unreadable where it is no folder."""
    top = Path(RUNS) if folder is None else folder.expanduser()
    if not top.is_dir():
        if folder is None and not os.path.lexists(top):
            return []
        raise Unreadable([Problem(rule="folder", says=f"{top} is no folder", mend="name the log.dir of runs, such as runs")])
    found = [listed_run(each) for each in run_folders(top)]
    return sorted(found, key=lambda run: (-run.when, str(run.folder)))


def run_folders(top: Path, depth: int = DEEPEST) -> Iterator[Path]:
    """The run folders at and below a folder; what can't be listed holds none."""
    if is_run(top):
        yield top
        return
    with suppress(OSError), os.scandir(top) as rows:
        for row in sorted(rows, key=lambda row: row.name):
            if depth and row.is_dir() and not row.name.startswith(".") and not row.name.endswith(PROOFS):
                yield from run_folders(Path(row.path), depth - 1)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's, whole or damaged."""
    with suppress(OSError):
        return any((folder / name).is_file() for name in MARKS) or any((folder / "checkpoints").glob("step_*"))
    return False


def listed_run(folder: Path) -> ListedRun:
    """One run folder, read as far as it can be."""
    run, plan, end = (_mapping(folder / name) for name in ("run.json", "plan.json", END))
    rows, unread = _last_rows(folder / "metrics.jsonl")
    checkpoint, passed = _checkpoints(folder)
    whole, steps = _whole(plan or {}, run or {}), max(rows.get("step") or 0, checkpoint or 0)
    held = holder(folder)
    state, says = _state(folder, held, end, steps, whole, checkpoint)
    faults = [f"checkpoint {reason}" for reason in passed]
    faults += [f"{many(unread, 'line')} of metrics.jsonl can't be read"] if unread else []
    faults += ["run.json can't be read"] if run is None and not held else []
    if run is None and not held:
        state = "damaged"
    return ListedRun(
        folder=folder,
        name=str((run or {}).get("name") or folder.name),
        steps=steps,
        of=whole,
        loss=rows.get("loss"),
        validation=rows.get("validation_loss"),
        checkpoint=checkpoint,
        when=_when(folder),
        state=state,
        says="; ".join([*([says] if says else []), *(f"damaged: {each}" for each in faults)]),
    )


def run_lines(runs: Sequence[ListedRun], top: Path) -> str:
    """A line a run, and below it what is to be said of it."""
    if not runs:
        return f"no runs in {one_line(str(top))}"
    names = ["run", *(one_line(_below(run.folder, top)) for run in runs)]
    numbers = table([["steps", "loss", "validation", "saved", "when", "state"], *map(_cells, runs)], left=(4, 5))
    wide = min(max(map(len, names)), width() - 2 - max(map(len, numbers)))
    lines: list[str] = []
    for name, line, says in zip(names, numbers, ["", *(run.says for run in runs)], strict=True):
        if len(name) > wide:
            lines.append(name)
            name = ""
        lines.append(f"{name.ljust(wide)}  {line}")
        lines += wrapped(one_line(says), indent="    ", hang="      ") if says else []
    return "\n".join(lines)


def run_rows(runs: Sequence[ListedRun]) -> list[dict[str, Any]]:
    """Runs as plain data."""
    return [{**asdict(run), "folder": str(run.folder)} for run in runs]


def _below(folder: Path, top: Path) -> str:
    """A run folder as named below the folder that is listed; its own name where it is that."""
    return folder.absolute().name if folder == top else os.path.relpath(folder, top)


def _cells(run: ListedRun) -> list[str]:
    losses = [f"{loss:.4f}" if loss is not None else "-" for loss in (run.loss, run.validation)]
    saved = str(run.checkpoint) if run.checkpoint is not None else "-"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.when))
    return [f"{run.steps}/{run.of if run.of is not None else '?'}", *losses, saved, when, run.state]


def _state(
    folder: Path, held: str, end: Mapping[str, Any] | None, steps: int, whole: int | None, checkpoint: int | None
) -> tuple[State, str]:
    """Running by its lock; else by how the last `fit` said that it ended, where nothing was written since; else by what is there."""
    if held:
        return "running", ""
    if end is not None and isinstance(status := end.get("status"), int) and _is_last(folder):
        says = str(end.get("says") or "")
        return ("finished", "") if status == 0 else ("stopped", "") if status > 1 else ("failed", says)
    if whole is not None and checkpoint is not None and checkpoint >= whole:
        return "finished", ""
    left = _text(folder / LOCK).strip()
    if left:
        return "failed", f"{left}, was killed"
    if steps == 0:
        return "new", ""
    return ("stopped", "") if checkpoint == steps else ("failed", "")


def _is_last(folder: Path) -> bool:
    """Whether no step was logged since the end was written: ranks that torchrun or sbatch started write no end."""
    logged = _modified(folder / "metrics.jsonl")
    return logged is None or logged <= (_modified(folder / END) or 0.0) + NEWER


def _checkpoints(folder: Path) -> tuple[int | None, tuple[str, ...]]:
    """The step of the newest checkpoint whose files have their sizes, and why newer ones have not."""
    with suppress(OSError):
        saved, passed = newest_saved(folder / "checkpoints")
        return saved.step if saved else None, passed
    return None, ()


def _whole(plan: Mapping[str, Any], run: Mapping[str, Any]) -> int | None:
    """The steps of the whole run, as planned, or as its config says."""
    whole, train = plan.get("run"), run.get("train")
    if isinstance(whole, dict) and isinstance(whole.get("steps"), int):
        return int(whole["steps"])
    if not isinstance(train, dict):
        return None
    if isinstance(train.get("steps"), int):
        return int(train["steps"])
    with suppress(KeyError, TypeError, ArithmeticError):
        steps: float = train["tokens"] / (train["batch"] * train["seq"])
        return ceil(steps)
    return None


def _last_rows(file: Path) -> tuple[dict[str, Any], int]:
    """The last step, loss and validation loss that metrics.jsonl says, and how many of the lines that were read are none.

    A last line without its end is being written, or was cut short by a crash, which the next start mends.
    """
    if not file.is_file():
        return {}, 0
    try:
        with file.open("rb") as opened:
            start = max(0, opened.seek(0, 2) - READ)
            opened.seek(start)
            lines = opened.read().split(b"\n")
    except OSError:
        return {}, 0
    found: dict[str, Any] = {}
    unread = 0
    for line in reversed(lines[1:-1] if start else lines[:-1]):
        if {"step", "loss"} <= found.keys() and ("validation_loss" in found or b'"validation_loss"' not in line):
            unread += not (line.startswith(b"{") and line.endswith(b"}"))  # all that is looked at of most lines
            continue
        row = _row(line)
        if row is None:
            unread += 1
        elif "restart" not in row:
            found = _figures(row) | found
    return found, unread


def _figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """The finite figures of a logged step that a listing shows."""
    losses = {key: row[key] for key in ("loss", "validation_loss") if isinstance(row.get(key), float) and isfinite(row[key])}
    step = row.get("step")
    return losses | ({"step": step} if isinstance(step, int) and not isinstance(step, bool) else {})


def _row(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        return row if isinstance(row, dict) else None
    return None


def _mapping(file: Path) -> dict[str, Any] | None:
    """A JSON file that holds a mapping; None where it is none or can't be read."""
    with suppress(OSError, ValueError, RecursionError):
        return _row(file.read_bytes()) if file.is_file() else None
    return None


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    return ""


def _modified(file: Path) -> float | None:
    with suppress(OSError):
        return file.stat().st_mtime
    return None


def _when(folder: Path) -> float:
    """Seconds since 1970 at which a run last wrote a figure, else its config, else anything."""
    times = (_modified(folder / name) for name in ("metrics.jsonl", "run.json", "."))
    return next((each for each in times if each is not None), 0.0)
