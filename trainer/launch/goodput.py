"""Goodput of a run over its attempts: restarts, steps done twice, the share of its time spent in steps that count."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..rundir.metric_rows import RESTART_KEY
from ..spec.numbers.as_text import plural, share_text
from ..system.atomic_file import append_line
from .supervisor.outcome import FAILED, Outcome


@dataclass(kw_only=True)
class GoodputMeter:
    """Measures the seconds spent in steps that count, out of all seconds of this `fit`. `folder` is RUN_DIR."""

    folder: Path
    restarts: int = 0
    lost_steps: int = 0  # steps that had to be done again
    productive_seconds: float = 0.0
    has_stepped: bool = False  # whether any attempt has reached its first step
    clock: Callable[[], float] = time.monotonic  # seconds
    _since: float = field(default_factory=time.monotonic)
    _began: tuple[int, float] | None = None  # this attempt: its first step, and when that began
    _failed: tuple[int, int, float] | None = None  # the last attempt, which failed: its first step, its last, the seconds between
    _pending: list[dict[str, object]] = field(default_factory=list)  # rows of the restarts since the last first step

    def note_first_step(self, step: int) -> None:
        """Note that an attempt has begun its first step: the work of the previous attempt from this step on is lost."""
        lost = 0
        if self._failed is not None:
            first, last, seconds = self._failed
            lost = max(0, last - step)
            self.lost_steps += lost
            self.productive_seconds += seconds * max(0, step - first) / max(1, last - first)
        for at, row in enumerate(self._pending):  # what was lost, the first of them lost
            self._write({**row, "step": step, "lost_steps": 0 if at else lost})
        self._pending.clear()
        self._began, self._failed = (step, self.clock()), None
        self.has_stepped = True

    def note_end(self, outcome: Outcome) -> None:
        """Note that an attempt has ended, at the last step that any rank reported."""
        if self._began is None:
            return
        (first, began), last = self._began, max((rank.step for rank in outcome.ranks if rank.step is not None), default=0)
        if outcome.status == FAILED:
            ended = max((rank.last_step_at for rank in outcome.ranks if rank.last_step_at is not None), default=began)
            self._failed = (first, last, max(0.0, ended - began))
        else:
            self.productive_seconds += self.clock() - began
        self._began = None

    def note_restart(self, outcome: Outcome, change: str = "") -> None:
        """Note that another attempt begins because of this outcome; `change` says how its hosts differ."""
        self.restarts += 1
        hosts = change.removeprefix(", ")
        self._pending.append({RESTART_KEY: self.restarts, "says": outcome.says, **({"hosts": hosts} if hosts else {})})

    def write_summary(self) -> str:
        """Write the run's goodput to metrics.jsonl, and return it as a line."""
        whole = self.clock() - self._since
        if self._failed is not None:  # no later attempt shows how much of it was lost
            self.productive_seconds += self._failed[2]
        for row in self._pending:  # the attempts that reached no step
            self._write(row)
        goodput = self.productive_seconds / whole if whole else 0.0
        self._write({"restarts": self.restarts, "lost_steps": self.lost_steps, "goodput": goodput, "seconds_in_all": whole})
        again = f"{plural(self.restarts, 'restart')}, {plural(self.lost_steps, 'step')} done again" if self.restarts else "no restart"
        return f"goodput {share_text(goodput)}: {self.productive_seconds:,.0f} s of {whole:,.0f} s in steps that count; {again}"

    def _write(self, row: dict[str, object]) -> None:
        """Append a whole line to metrics.jsonl, or nothing: a full disk does not stop the run."""
        line = f"{json.dumps(row)}\n".encode()
        with suppress(OSError), (self.folder / "metrics.jsonl").open("ab", buffering=0) as file:
            append_line(file.fileno(), line)
