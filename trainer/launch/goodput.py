"""What the starts of a run were good for: restarts, steps that were done twice, the share of seconds in steps that count."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...cli.pages.format import many, share
from ..system.atomic_file import append
from .supervisor.outcome import FAILED, Ended


@dataclass(kw_only=True)
class Tally:
    """What the starts of a run were good for: seconds in steps that count, of all seconds. `folder` is RUN_DIR."""

    folder: Path
    restarts: int = 0
    lost: int = 0  # steps that were done twice
    productive: float = 0.0  # seconds
    stepped: bool = False  # a start has come to its first step
    _since: float = field(default_factory=time.monotonic)
    _began: tuple[int, float] | None = None  # this start's first step, and when that was
    _spent: tuple[int, int, float] | None = None  # the last start's first step and the one that it reached, and the seconds between
    _why: str = ""

    def begins(self, step: int) -> None:
        """A start has begun its first step: what the one before did from this step on is lost."""
        if self._spent is not None:
            first, reached, seconds = self._spent
            lost = max(0, reached - step)
            self.lost += lost
            self.productive += seconds * max(0, step - first) / max(1, reached - first)
            self._write({"restart": self.restarts, "step": step, "lost_steps": lost, "says": self._why})
        self._began, self._spent = (step, time.monotonic()), None
        self.stepped = True

    def ends(self, ended: Ended) -> None:
        """A start has ended: at the step of its last beat."""
        if self._began is None:
            return
        (first, at), reached = self._began, max((end.step for end in ended.ranks if end.step is not None), default=0)
        last = max((end.beat for end in ended.ranks if end.beat is not None), default=at)
        if ended.status == FAILED:
            self._spent = (first, reached, max(0.0, last - at))
        else:
            self.productive += time.monotonic() - at
        self._began = None

    def starts_again(self, ended: Ended) -> None:
        """It is started once more."""
        self.restarts += 1
        self._why = ended.says

    def said(self) -> str:
        """The run's goodput as a line, which goes to metrics.jsonl too."""
        whole = time.monotonic() - self._since
        if self._spent is not None:  # nobody knows yet what of it counts
            self.productive += self._spent[2]
        goodput = self.productive / whole if whole else 0.0
        self._write({"restarts": self.restarts, "lost_steps": self.lost, "goodput": goodput, "seconds_in_all": whole})
        again = f"{many(self.restarts, 'restart')}, {many(self.lost, 'step')} done again" if self.restarts else "no restart"
        return f"goodput {share(goodput)}: {self.productive:,.0f} s of {whole:,.0f} s in steps that count; {again}"

    def _write(self, row: dict[str, object]) -> None:
        """A line of metrics.jsonl, whole or not at all: a run goes on where the disk is full."""
        line = f"{json.dumps(row)}\n".encode()
        with suppress(OSError), (self.folder / "metrics.jsonl").open("ab", buffering=0) as file:
            append(file.fileno(), line)
