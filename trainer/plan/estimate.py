"""One layout's estimate, quick enough for a sweep: legal, fits, step seconds and peak bytes, from the plan's own terms."""

from __future__ import annotations

from typing import NamedTuple

from ..spec.run import Parallel, Run
from .cost_context import Frame
from .layout_cost import Costs, costs
from .rules import OF_LAYOUT, OF_RUN, broken


class Estimate(NamedTuple):
    """What a sweep asks of a layout; where it isn't legal the rest is empty. Seconds are None where a rate is unknown."""

    legal: bool
    fits: bool
    step: float | None
    peak: int | None  # bytes of the fullest rank


ILLEGAL = Estimate(False, False, None, None)


class Estimator:
    """Estimates of layouts of one run; what layouts share is worked out once."""

    def __init__(self, run: Run) -> None:
        """Raises ValueError for a run that breaks a rule whatever its layout."""
        found = broken(run, run.parallel, run.train.microbatch, OF_RUN)
        if found:
            raise ValueError("; ".join(each.says for each in found))
        self.frame = Frame(run)

    def __call__(self, parallel: Parallel, microbatch: int) -> Estimate:
        """The estimate of the run's model and batch under these degrees."""
        if broken(self.frame.run, parallel, microbatch, OF_LAYOUT):
            return ILLEGAL
        of = self.costs(parallel, microbatch)
        return Estimate(True, of.peak <= self.frame.capacity, of.seconds.step if of.seconds else None, of.peak)

    def costs(self, parallel: Parallel, microbatch: int) -> Costs:
        """The costs of degrees that are legal."""
        return costs(self.frame, self.frame.layout(parallel, microbatch))
