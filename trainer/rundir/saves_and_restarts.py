"""A run's saves and restarts, read from the rows of metrics.jsonl: how long saves took, and why and on which hosts the run went on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .metric_rows import END_WAIT_KEY, RESTART_KEY, SAVE_KEY
from .read_files import finite_number, whole_number

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RecordedSave:
    """A save after `step`: its seconds and bytes (None: it failed), the seconds that training waited for it, and those since the last save
    ended or this attempt began to train (None: not known). `end_wait` are the seconds of both in which its attempt, which had ended, had
    nothing left to train."""

    step: int
    seconds: float | None
    bytes: int | None
    pause: float
    interval: float | None
    end_wait: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SavesInAll:
    """All saves of a run: how many are complete and how many failed; median and longest seconds of those that are complete; their bytes in
    all; the seconds that training waited in all, and as a share of the time up to the last save (None: not known), both without the ends of
    attempts."""

    count: int = 0
    failed: int = 0
    seconds: float | None = None
    longest: float | None = None
    bytes: int = 0
    pause: float = 0.0
    share: float | None = None


@dataclass(frozen=True, kw_only=True)
class RestartReason:
    """Why a run was restarted and how its hosts changed ("": they did not, or it is not known); the step from which it went on and the
    steps that were lost (None: it reached no step)."""

    step: int | None
    lost: int | None
    says: str
    hosts: str


def recorded_saves(rows: Rows) -> Iterator[RecordedSave]:
    """Yield the saves that rows tell of, in their order; a damaged row is left out."""
    for row in rows:
        if SAVE_KEY not in row:
            continue
        step, size = whole_number(row.get("step")), whole_number(row.get("save_bytes"))
        seconds, pause, interval = (_seconds(row.get(key)) for key in ("save_seconds", SAVE_KEY, "save_interval"))
        is_complete, has_failed = seconds is not None and size is not None, row.get("save_failed") == 1
        if step is not None and pause is not None and is_complete is not has_failed:
            end_wait = min(_seconds(row.get(END_WAIT_KEY)) or 0.0, pause)
            yield RecordedSave(step=step, seconds=seconds, bytes=size, pause=pause, interval=interval, end_wait=end_wait)


def saves_in_all(saves: Sequence[RecordedSave]) -> SavesInAll:
    """Sum up a run's saves, of all attempts."""
    complete = [each.seconds for each in saves if each.seconds is not None]
    ended = sum(each.end_wait for each in saves)
    pause, passed = sum(each.pause for each in saves) - ended, [each.interval for each in saves if each.interval is not None]
    whole = sum(passed) - ended if len(passed) == len(saves) else 0.0
    return SavesInAll(
        count=len(complete),
        failed=len(saves) - len(complete),
        seconds=median(complete) if complete else None,
        longest=max(complete, default=None),
        bytes=sum(each.bytes or 0 for each in saves),
        pause=pause,
        share=min(1.0, pause / whole) if whole > 0 else None,
    )


def median_pause(saves: Sequence[RecordedSave]) -> float | None:
    """Return the median seconds that training waited for a complete save, without the ends of attempts: no step followed under which the
    rest of it could be written."""
    found = [each.pause - each.end_wait for each in saves if each.seconds is not None]
    return median(found) if found else None


def restart_reasons(rows: Rows) -> Iterator[RestartReason]:
    """Yield the restarts that rows tell of, in their order; a row without a step and a reason is left out."""
    for row in rows:
        if RESTART_KEY not in row:
            continue
        step, lost, says, hosts = (
            whole_number(row.get("step")),
            whole_number(row.get("lost_steps")),
            _text(row, "says"),
            _text(row, "hosts"),
        )
        if says or (step is not None and lost is not None):
            yield RestartReason(step=step, lost=lost if step is not None else None, says=says, hosts=hosts)


def _seconds(value: Any) -> float | None:
    found = finite_number(value)
    return found if found is not None and found >= 0 else None


def _text(row: Mapping[str, Any], key: str) -> str:
    found = row.get(key)
    return found if isinstance(found, str) else ""
