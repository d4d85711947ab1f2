"""Steps that must not be taken, and losses that stand out: what the loop makes of them."""

from __future__ import annotations

from collections import deque
from math import isfinite
from statistics import median
from typing import Any

from ..engines.engine import Stepped
from ..spec.run import Run
from .failure import AllFailed
from .position import BEGINNING, Position

RECENT = 64  # losses that a new one is held against
FEWEST = 16  # of them, before anything is said
HIGH = 6.0  # robust z-score of a spike
SPREAD = 1.4826  # standard deviations in a median of absolute deviations, of a normal distribution
FLOOR = 0.005  # of the median loss: no spread is taken for smaller
LEAST = 0.1  # nats, below which no median is taken either: a loss may come down to nothing


class Poisoned(AllFailed):
    """More steps in a row than train.skip were skipped."""


class Poison:
    """Counts steps that were skipped in a row, and remembers recent losses. All ranks see the same steps."""

    def __init__(self, run: Run, start: Position = BEGINNING) -> None:
        self.run, self.start = run, start
        self._skipped = 0
        self._losses: deque[float] = deque(maxlen=RECENT)

    def marks(self, stepped: Stepped, done: int) -> dict[str, Any]:
        """What the row of a step says beside its figures: `skipped` and which `samples`, or how far its loss is a `spike`."""
        self._skipped = self._skipped + 1 if stepped.skipped else 0
        if stepped.skipped:
            return {"grad_norm": None, "skipped": True, "samples": self._samples(done)}
        score = self.score(stepped.loss)
        self._losses.append(stepped.loss)
        return {"spike": round(score, 1)} if score > HIGH else {}

    def score(self, loss: float) -> float:
        """How far a loss is above recent ones: in spreads of theirs, by medians, which other spikes don't move."""
        if len(self._losses) < FEWEST:
            return 0.0
        middle = median(self._losses)
        spread = SPREAD * median(abs(each - middle) for each in self._losses)
        return (loss - middle) / max(spread, FLOOR * max(abs(middle), LEAST))

    def stop(self, stepped: Stepped, done: int) -> None:
        """Raises Poisoned where a run has skipped too many steps in a row. fp16 skips until its loss scale has fallen."""
        most = self.run.train.skip
        if self._skipped <= most or (self.run.train.precision == "fp16" and isfinite(stepped.loss)):
            return
        first, last = self._samples(done)
        often = "it" if most == 0 else f"it, like the {most} before it," if most > 1 else "it, like the one before it,"
        raise Poisoned(
            f"step {done}: the loss or a gradient is not finite, and {often} was skipped (train.skip={most}): "
            f"look at samples {first} to {last}, or set a lower optim.lr"
        )

    def _samples(self, done: int) -> tuple[int, int]:
        """The first and the last of a step's batch, as batches.py numbers them."""
        return self.start.after(self.run, done - 1).sample, self.start.after(self.run, done).sample - 1


def finite(value: float | None) -> float | None:
    """A figure as JSON can say it."""
    return value if value is not None and isfinite(value) else None
