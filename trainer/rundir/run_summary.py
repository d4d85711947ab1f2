"""A summary of each run below a folder: how far it is, its last losses, its state."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path
from typing import Any, Literal

from ..spec.numbers.as_text import plural
from ..spec.problem import Problem, Unreadable
from .checkpoints import SavedStep, checkpoints_folder, newest_saved
from .files import LOGGED_KEY, METRICS_FILE, OUTCOME_FILE, is_run_folder
from .lock import LOCK_FILE as LOCK
from .lock import lock_holder
from .metric_rows import VALIDATION_KEY, is_step_row, main_validation_loss, validation_key, validation_losses
from .read_files import nested_value

State = Literal["running", "finished", "stopped", "failed", "new", "damaged"]

RUNS = "runs"  # the default of log.dir, and the word for runs on the command line
MAX_DEPTH = 3  # folders below the listed one: a run's name may have slashes
PROOFS = ".prove"  # suffix of the folders of `distrain prove`, whose runs are not listed
TAIL_BYTES = 16 << 20  # bytes of metrics.jsonl that are read, from its end
CLOCK_SLACK = 2.0  # seconds by which metrics.jsonl may seem newer than the ended.json written after it


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run folder: its steps, last losses, newest whole checkpoint and state."""

    folder: Path
    name: str
    steps: int  # done
    of: int | None  # planned
    loss: float | None
    validation: float | None
    checkpoint: int | None  # step of the newest whole checkpoint
    when: float  # last write, seconds since 1970
    state: State
    says: str  # why it failed, or what of the folder is damaged


def run_summaries(folder: Path | None) -> list[RunSummary]:
    """Summaries of the runs below a folder (default: `runs`, which may be missing), newest first; raises Unreadable for no folder."""
    top = Path(RUNS) if folder is None else folder.expanduser()
    if not top.is_dir():
        if folder is None and not os.path.lexists(top):
            return []
        raise Unreadable([Problem(rule="folder", says=f"{top} is not a folder", mend="give the log.dir of runs, such as runs")])
    found = [run_summary(each) for each in run_folders(top)]
    return sorted(found, key=lambda run: (-run.when, str(run.folder)))


def run_folders(top: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """The run folders at and below a folder; a folder that can't be listed counts as empty."""
    if is_run_folder(top):
        yield top
        return
    with suppress(OSError), os.scandir(top) as rows:
        for row in sorted(rows, key=lambda row: row.name):
            if depth and row.is_dir() and not row.name.startswith(".") and not row.name.endswith(PROOFS):
                yield from run_folders(Path(row.path), depth - 1)


def run_summary(folder: Path) -> RunSummary:
    """Summarize one run folder, as far as it can be read."""
    run, plan, end = (_json_file(folder / name) for name in ("run.json", "plan.json", OUTCOME_FILE))
    last, unreadable_lines = _last_figures(folder / "metrics.jsonl")
    checkpoint, skipped = newest_checkpoint(folder)
    planned, steps = planned_steps(plan or {}, run or {}), max(last.get("step") or 0, checkpoint or 0)
    held = lock_holder(folder)
    state, says = _state(folder, held, end, steps, planned, checkpoint)
    damage = [f"checkpoint {reason}" for reason in skipped]
    damage += [f"{plural(unreadable_lines, 'line')} of metrics.jsonl can't be read"] if unreadable_lines else []
    if not is_config(run or {}) and not held:
        is_there = os.path.lexists(folder / "run.json")
        damage.append(
            "run.json is missing" if not is_there else "run.json can't be read" if run is None else "run.json is not a run's config"
        )
        state = "damaged"
    return RunSummary(
        folder=folder,
        name=str((run or {}).get("name") or folder.name),
        steps=steps,
        of=planned,
        loss=last.get("loss"),
        validation=main_validation_loss(last),
        checkpoint=checkpoint,
        when=_last_write(folder),
        state=state,
        says="; ".join([*([says] if says else []), *(f"damaged: {each}" for each in damage)]),
    )


def _state(
    folder: Path, held: str, end: Mapping[str, Any] | None, steps: int, planned: int | None, checkpoint: int | None
) -> tuple[State, str]:
    """A run's state and why it failed: by its lock, else by the exit status of its last `fit`, else by its steps and checkpoints."""
    if held:
        return "running", ""
    if end is not None and isinstance(status := end.get("status"), int) and _is_outcome_newest(folder, end):
        says = str(end.get("says") or "")
        return ("finished", "") if status == 0 else ("stopped", "") if status > 1 else ("failed", says)
    if planned is not None and checkpoint is not None and checkpoint >= planned:
        return "finished", ""
    left = _text(folder / LOCK).strip()
    if left:
        return "failed", f"{left}, was killed"
    if steps == 0:
        return "new", ""
    return ("stopped", "") if checkpoint == steps else ("failed", "")


def _is_outcome_newest(folder: Path, end: Mapping[str, Any]) -> bool:
    """Whether no step was logged after ended.json was written: ranks that torchrun or sbatch started log steps and write no end.

    The bytes that were logged say so, whatever clocks and copies have made of the files' times, which those of earlier versions need.
    """
    if isinstance(logged_before := end.get(LOGGED_KEY), int):
        return not _has_step_rows(folder / METRICS_FILE, logged_before)
    logged = _write_time(folder / METRICS_FILE)
    return logged is None or logged <= (_write_time(folder / OUTCOME_FILE) or 0.0) + CLOCK_SLACK


def _has_step_rows(metrics: Path, start: int) -> bool:
    """Whether a metrics.jsonl has rows of steps from a byte on; a `fit` that has no step left adds others."""
    with suppress(OSError), open(metrics, "rb") as file:
        file.seek(start)
        for line in file:
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and is_step_row(row):
                    return True
    return False


def newest_checkpoint(folder: Path) -> tuple[int | None, tuple[str, ...]]:
    """The step of the newest checkpoint whose files have their sizes, and why newer ones were skipped."""
    saved, skipped = newest_saved_step(folder)
    return saved.step if saved else None, skipped


def newest_saved_step(folder: Path) -> tuple[SavedStep | None, tuple[str, ...]]:
    """The newest checkpoint whose files have their sizes, and why newer ones were skipped; None where the folder can't be read."""
    with suppress(OSError):
        return newest_saved(checkpoints_folder(folder))
    return None, ()


def is_config(run: Mapping[str, Any]) -> bool:
    """Whether the content of run.json is the config of a run, of this version or an earlier one."""
    return isinstance(run.get("train"), dict) and isinstance(run.get("model"), dict)


def planned_steps(plan: Mapping[str, Any], run: Mapping[str, Any]) -> int | None:
    """The steps of the whole run, by its plan, else by its config."""
    whole, train = plan.get("run"), run.get("train")
    if isinstance(whole, dict) and isinstance(whole.get("steps"), int):
        return int(whole["steps"])
    if not isinstance(train, dict):
        return None
    if isinstance(train.get("steps"), int):
        return int(train["steps"])
    if nested_value(train, "rampup", "batch") is not None:
        return None  # its steps differ
    with suppress(KeyError, TypeError, ArithmeticError):
        steps: float = train["tokens"] / (train["batch"] * train["seq"])
        return ceil(steps)
    return None


def _last_figures(file: Path) -> tuple[dict[str, Any], int]:
    """The last step, loss and validation losses in metrics.jsonl, and how many of its lines can't be read.

    A last line without its newline is not counted: it is being written, or a crash cut it short and the next attempt repairs it.
    """
    if not file.is_file():
        return {}, 0
    try:
        with file.open("rb") as opened:
            start = max(0, opened.seek(0, 2) - TAIL_BYTES)
            opened.seek(start)
            lines = opened.read().split(b"\n")
    except OSError:
        return {}, 0
    found: dict[str, Any] = {}
    unreadable = 0
    for line in reversed(lines[1:-1] if start else lines[:-1]):
        if {"step", "loss"} <= found.keys() and (validation_losses(found) or f'"{VALIDATION_KEY}'.encode() not in line):
            unreadable += not (line.startswith(b"{") and line.endswith(b"}"))  # most lines are not parsed
            continue
        row = _json_object(line)
        if row is None:
            unreadable += 1
        elif is_step_row(row):
            found = _figures(row) | found
    return found, unreadable


def _figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """The step and the finite losses of a logged row."""
    named = ("loss", *map(validation_key, validation_losses(row)))
    losses = {key: row[key] for key in named if isinstance(row.get(key), float) and isfinite(row[key])}
    step = row.get("step")
    return losses | ({"step": step} if isinstance(step, int) and not isinstance(step, bool) else {})


def _json_object(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        return row if isinstance(row, dict) else None
    return None


def _json_file(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none or it can't be read."""
    with suppress(OSError, ValueError, RecursionError):
        return _json_object(file.read_bytes()) if file.is_file() else None
    return None


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    return ""


def _write_time(file: Path) -> float | None:
    with suppress(OSError):
        return file.stat().st_mtime
    return None


def _last_write(folder: Path) -> float:
    """Seconds since 1970 at which metrics.jsonl was last written, else run.json, else the folder."""
    times = (_write_time(folder / name) for name in ("metrics.jsonl", "run.json", "."))
    return next((each for each in times if each is not None), 0.0)
