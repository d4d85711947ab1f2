"""How far a run has trained: its step, next sample and tokens, which determine its batches and its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from ...spec.run import Run


@dataclass(frozen=True, kw_only=True)
class TrainProgress:
    """A run after `step` steps: the number of its next sample in the order of its data, and the tokens trained on."""

    step: int = 0
    sample: int = 0
    tokens: int = 0

    def after(self, run: Run, done: int) -> TrainProgress:
        """Return the progress after step `done`, if every step from here on has the run's present batch."""
        samples = (done - self.step) * run.train.batch
        return TrainProgress(step=done, sample=self.sample + samples, tokens=self.tokens + samples * run.train.seq)

    def last_step(self, run: Run) -> int:
        """Return the step at which the run ends: train.steps, or the step that reaches train.tokens."""
        if run.train.steps is not None:
            return run.train.steps
        left = (run.train.tokens or 0) - self.tokens
        return self.step + max(0, ceil(left / (run.train.batch * run.train.seq)))

    def extra(self) -> dict[str, int]:
        """Return what a checkpoint records of it."""
        return {"samples": self.sample, "tokens": self.tokens}


BEGINNING = TrainProgress()


def resumed_progress(step: int, extra: Mapping[str, Any], before: Run, now: Run, *, other_data: bool) -> TrainProgress:
    """Return where the run `now` resumes from the checkpoint of a step, which the run `before` saved.

    If the sequence length has changed, samples are renumbered so that the same number of tokens precedes the next one. Other data
    start at their first sample. Checkpoints of earlier versions do not record tokens: every step until then had the batch of `before`.
    """
    tokens = int(extra.get("tokens", step * before.train.batch * before.train.seq))
    sample = int(extra.get("samples", step * before.train.batch))
    if before.train.seq != now.train.seq:
        sample = sample * before.train.seq // now.train.seq
    return TrainProgress(step=step, sample=0 if other_data else sample, tokens=tokens)
