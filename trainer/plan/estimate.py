"""Estimates of layouts, quick enough for a sweep, from the plan's own cost functions."""

from __future__ import annotations

from typing import NamedTuple

from ..spec.run import Parallel, Run
from .costs.cost_context import CostContext
from .layout_cost import LayoutCost, layout_cost
from .layout_of_run import layout_of_run
from .rules.rules import OF_LAYOUT, OF_RUN, broken_rules


class Estimate(NamedTuple):
    """A layout in short. `fits`, `step` and `peak` are empty where it isn't legal."""

    legal: bool
    fits: bool
    step: float | None  # seconds; None: a rate is unknown
    peak: int | None  # bytes of the fullest rank


ILLEGAL = Estimate(False, False, None, None)


class Estimator:
    """Estimates layouts of one run, with one cost context for all of them."""

    def __init__(self, run: Run) -> None:
        """Raises ValueError for a run that breaks a rule in every layout."""
        found = broken_rules(run, run.parallel, run.train.microbatch, OF_RUN)
        if found:
            raise ValueError("; ".join(each.says for each in found))
        self.context = CostContext(run)

    def __call__(self, parallel: Parallel, microbatch: int) -> Estimate:
        """Estimate the run's model and batch under these degrees."""
        if broken_rules(self.context.run, parallel, microbatch, OF_LAYOUT):
            return ILLEGAL
        cost = self.layout_cost(parallel, microbatch)
        return Estimate(True, cost.peak <= self.context.capacity, cost.seconds.step if cost.seconds else None, cost.peak)

    def layout_cost(self, parallel: Parallel, microbatch: int) -> LayoutCost:
        """The cost of legal degrees."""
        return layout_cost(self.context, layout_of_run(self.context, parallel, microbatch))
