"""How far a run has trained: its step, next sample and tokens, which determine its batches and its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...spec.derived.batch_levels import level_of_step, samples_before, steps_of_levels, steps_until
from ...spec.run import Run


@dataclass(frozen=True, kw_only=True)
class TrainProgress:
    """A run after `step` steps: the number of its next sample in the order of its data, and the tokens trained on."""

    step: int = 0
    sample: int = 0
    tokens: int = 0

    def after(self, run: Run, done: int) -> TrainProgress:
        """Return the progress after step `done`, if the steps from here on have the batches that the run has now."""
        samples = samples_before(run.train, done - self.step, self.tokens)
        return TrainProgress(step=done, sample=self.sample + samples, tokens=self.tokens + samples * run.train.seq)

    def last_step(self, run: Run) -> int:
        """Return the step at which the run ends: train.steps, or the step that reaches train.tokens."""
        if run.train.steps is not None:
            return run.train.steps
        return self.step + steps_until(run.train, (run.train.tokens or 0) - self.tokens, self.tokens)

    def batch(self, run: Run, step: int) -> int:
        """Return the sequences of step `step` (from 0), which is not before this progress: train.batch, or what train.rampup says."""
        return level_of_step(run.train, step - self.step, self.tokens).batch

    def whole_batch_step(self, run: Run) -> int:
        """Return the first step from here on (from 0) whose batch is train.batch: the next one, or that after train.rampup."""
        return self.step + steps_of_levels(run.train, self.tokens)[-1].steps

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
