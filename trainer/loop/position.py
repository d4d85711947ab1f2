"""Where a run stands: the step, the next sample and the tokens it has read, from which its batches and its end follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from ..spec.run import Run


@dataclass(frozen=True, kw_only=True)
class Position:
    """A run after `step` steps: its next sample is number `sample` in the order of its data, `tokens` were trained on before."""

    step: int = 0
    sample: int = 0
    tokens: int = 0

    def after(self, run: Run, done: int) -> Position:
        """Return the position after step `done`, every step since this one having the batch that the run has now."""
        samples = (done - self.step) * run.train.batch
        return Position(step=done, sample=self.sample + samples, tokens=self.tokens + samples * run.train.seq)

    def last_step(self, run: Run) -> int:
        """Return the step at which the run ends: train.steps, or the step that reaches train.tokens."""
        if run.train.steps is not None:
            return run.train.steps
        left = (run.train.tokens or 0) - self.tokens
        return self.step + max(0, ceil(left / (run.train.batch * run.train.seq)))

    def extra(self) -> dict[str, int]:
        """Return what a checkpoint keeps of it."""
        return {"samples": self.sample, "tokens": self.tokens}


BEGINNING = Position()


def resumed_position(step: int, extra: Mapping[str, Any], before: Run, now: Run, *, other_data: bool) -> Position:
    """Return where a run goes on that has loaded the checkpoint of a step, saved by the run `before`.

    Samples of another length are counted anew, so that as many tokens lie before the next one. Other data begin at their first
    sample. Checkpoints of earlier versions say nothing of tokens: every step until then had the batch of `before`.
    """
    tokens = int(extra.get("tokens", step * before.train.batch * before.train.seq))
    sample = int(extra.get("samples", step * before.train.batch))
    if before.train.seq != now.train.seq:
        sample = sample * before.train.seq // now.train.seq
    return Position(step=step, sample=0 if other_data else sample, tokens=tokens)
