"""Anomalous steps: those skipped because something was not finite or a spike, and loss spikes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from ...engines.engine import NO_LIMITS, StepLimits, StepResult
from ...spec.run import Run
from ..step.train_progress import BEGINNING, TrainProgress
from .failure import AllRanksFailed
from .recent_values import RecentValues

MOST_OVERFLOWS = 64  # in a row, of fp16: halved so often, no loss scale is left that could fall
SPIKE_SCORE = 6.0  # deviations above recent losses from which a loss is a spike
LOSS_SPREAD, LEAST_LOSS = 0.005, 0.1  # a loss (nats) may fall to almost 0
NORM_SPREAD, LEAST_NORM = 0.05, 1e-6  # a norm may be 0


class TooManySkippedSteps(AllRanksFailed):
    """More steps in a row than train.skip were skipped."""


class Anomalies:
    """Counts steps skipped in a row, remembers recent losses and gradient norms, and says which are too large (train.skip_spikes). All
    ranks see the same steps."""

    def __init__(self, run: Run, start: TrainProgress = BEGINNING, recent: Mapping[str, Sequence[float]] | None = None) -> None:
        """`recent` is what `record` returned at the checkpoint that the run resumes from."""
        self.run, self.start = run, start
        self._skipped = 0
        recent = recent or {}
        self._losses = RecentValues(LOSS_SPREAD, LEAST_LOSS, recent.get("losses", ()))
        self._norms = RecentValues(NORM_SPREAD, LEAST_NORM, recent.get("norms", ()))

    def recent_figures(self) -> dict[str, list[float]]:
        """Return what a checkpoint keeps, so that a run that resumes skips the same steps; nothing where none is skipped as a spike."""
        return {"losses": self._losses.values(), "norms": self._norms.values()} if self.run.train.skip_spikes else {}

    def limits(self) -> StepLimits:
        """Return the limits of the next step."""
        score = self.run.train.skip_spikes
        return StepLimits(self._losses.limit(score), self._norms.limit(score)) if score else NO_LIMITS

    def add_step(self, result: StepResult, done: int) -> dict[str, Any]:
        """Add step `done` (from 1). Return what its metrics row says of an anomaly: `skipped` and its `samples`, the score of a `spike` of
        the loss, or of the gradient norm (`norm_spike`) for which it was skipped; empty for a normal step."""
        self._skipped = self._skipped + 1 if result.skipped else 0
        if result.skipped and not result.beyond_limits:
            return {"grad_norm": None, "skipped": True, "samples": self._samples(done)}
        norm, most = result.grad_norm, self.run.train.skip_spikes if result.beyond_limits else SPIKE_SCORE
        scores = {"spike": self._losses.score(result.loss)}
        if result.beyond_limits and norm is not None:
            scores["norm_spike"] = self._norms.score(norm)
        self._losses.add(result.loss)
        if norm is not None:
            self._norms.add(norm)
        row: dict[str, Any] = {"skipped": True, "samples": self._samples(done)} if result.beyond_limits else {}
        return row | {name: round(score, 1) for name, score in scores.items() if score > most}

    def raise_if_too_many(self, result: StepResult, done: int) -> None:
        """Raise TooManySkippedSteps where more steps in a row than train.skip were skipped.

        fp16 skips overflows until its loss scale has fallen: these steps, whose loss is finite, do not count, unless there are more of them
        than the scale can fall.
        """
        allowed, spiked = self.run.train.skip, result.beyond_limits
        has_overflowed = self.run.train.precision == "fp16" and isfinite(result.loss) and not spiked
        if self._skipped <= (max(allowed, MOST_OVERFLOWS) if has_overflowed else allowed):
            return
        if has_overflowed:
            says = f"step {done}: the gradients of {self._skipped} steps in a row were not finite, and the loss scale can fall no further"
            raise TooManySkippedSteps(f"{says}: set a lower optim.lr, or train.precision=bf16")
        first, last = self._samples(done)
        it = "it" if allowed == 0 else f"it, like the {allowed} before it," if allowed > 1 else "it, like the one before it,"
        score = f"{self.run.train.skip_spikes:g}"
        why = f"is more than {score} deviations above recent ones" if spiked else "is not finite"
        or_else = ", or a higher train.skip_spikes" if spiked else ""
        raise TooManySkippedSteps(
            f"step {done}: the loss or {'the norm of the gradients' if spiked else 'a gradient'} {why}, and {it} was skipped "
            f"(train.skip={allowed}): look at samples {first} to {last}, or set a lower optim.lr{or_else}"
        )

    def _samples(self, done: int) -> tuple[int, int]:
        """Return the first and the last sample of a step's batch, numbered as in data/samples/batches.py."""
        return self.start.after(self.run, done - 1).sample, self.start.after(self.run, done).sample - 1
