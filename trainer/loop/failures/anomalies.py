"""Anomalous steps: those skipped because something was not finite, and loss spikes."""

from __future__ import annotations

from collections import deque
from math import isfinite
from statistics import median
from typing import Any

from ...engines.engine import StepResult
from ...spec.run import Run
from ..step.train_progress import BEGINNING, TrainProgress
from .failure import AllRanksFailed

RECENT_LOSSES = 64  # losses that a new one is compared with
MIN_LOSSES = 16  # fewer are compared with nothing
SPIKE_SCORE = 6.0  # robust z-score from which a loss is a spike
SIGMA_PER_MAD = 1.4826  # standard deviation over the median absolute deviation, of a normal distribution
MIN_SPREAD = 0.005  # the smallest spread, as a share of the median loss
MIN_MEDIAN = 0.1  # nats; the smallest median that MIN_SPREAD is a share of: a loss may fall to almost 0


class TooManySkippedSteps(AllRanksFailed):
    """More steps in a row than train.skip were skipped."""


class Anomalies:
    """Counts steps skipped in a row and remembers recent losses. All ranks see the same steps."""

    def __init__(self, run: Run, start: TrainProgress = BEGINNING) -> None:
        self.run, self.start = run, start
        self._skipped = 0
        self._losses: deque[float] = deque(maxlen=RECENT_LOSSES)

    def add_step(self, result: StepResult, done: int) -> dict[str, Any]:
        """Add step `done` (from 1). Return what its metrics row says of an anomaly: `skipped` and its `samples`, or the score of a
        `spike`; empty for a normal step."""
        self._skipped = self._skipped + 1 if result.skipped else 0
        if result.skipped:
            return {"grad_norm": None, "skipped": True, "samples": self._samples(done)}
        score = self.spike_score(result.loss)
        self._losses.append(result.loss)
        return {"spike": round(score, 1)} if score > SPIKE_SCORE else {}

    def spike_score(self, loss: float) -> float:
        """Return the robust z-score of a loss among recent ones. It is based on medians, which earlier spikes barely move."""
        if len(self._losses) < MIN_LOSSES:
            return 0.0
        middle = median(self._losses)
        spread = SIGMA_PER_MAD * median(abs(each - middle) for each in self._losses)
        return (loss - middle) / max(spread, MIN_SPREAD * max(abs(middle), MIN_MEDIAN))

    def raise_if_too_many(self, result: StepResult, done: int) -> None:
        """Raise TooManySkippedSteps where more steps in a row than train.skip were skipped.

        fp16 skips overflows until its loss scale has fallen: these steps, whose loss is finite, do not count.
        """
        allowed = self.run.train.skip
        if self._skipped <= allowed or (self.run.train.precision == "fp16" and isfinite(result.loss)):
            return
        first, last = self._samples(done)
        it = "it" if allowed == 0 else f"it, like the {allowed} before it," if allowed > 1 else "it, like the one before it,"
        raise TooManySkippedSteps(
            f"step {done}: the loss or a gradient is not finite, and {it} was skipped (train.skip={allowed}): "
            f"look at samples {first} to {last}, or set a lower optim.lr"
        )

    def _samples(self, done: int) -> tuple[int, int]:
        """Return the first and the last sample of a step's batch, numbered as in data/batches.py."""
        return self.start.after(self.run, done - 1).sample, self.start.after(self.run, done).sample - 1
