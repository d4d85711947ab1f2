"""Estimates of layouts, quick enough for a sweep, from the plan's own cost functions."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from ..spec.run import Parallel, Run
from .costs.cost_context import CostContext
from .engines import engine_for
from .layout_cost import fits, layout_cost
from .layout_of_run import LayoutBase, base_key
from .rules.rules import OF_LAYOUT, OF_RUN, OF_STEP, STEP_KEYS, broken_rules


class Estimate(NamedTuple):
    """A layout in short. `fits`, `step` and `peak` are empty where it isn't legal."""

    legal: bool
    fits: bool
    step: float | None  # seconds; None: a rate is unknown
    peak: int | None  # bytes of the fullest rank


ILLEGAL = Estimate(False, False, None, None)
OF_BASE = tuple(rule for rule in OF_LAYOUT if rule not in OF_STEP)
_step_key = attrgetter(*STEP_KEYS)


class Estimator:
    """Estimates layouts of one run, with one cost context for all of them."""

    def __init__(self, run: Run) -> None:
        """Raises ValueError for a run that breaks a rule in every layout."""
        found = broken_rules(run, run.parallel, run.train.microbatch, OF_RUN)
        if found:
            raise ValueError("; ".join(each.says for each in found))
        self.context = CostContext(run)
        self._bases: dict[tuple[object, ...], LayoutBase | None] = {}  # None: the layout breaks a rule with every micro-batch
        self._is_broken: dict[tuple[object, ...], bool] = {}  # whether a layout breaks a rule of its step

    def __call__(self, parallel: Parallel, microbatch: int) -> Estimate:
        """Estimate the run's model and batch under these degrees."""
        if self._breaks_step_rules(parallel, microbatch) or (base := self._base(parallel)) is None:
            return ILLEGAL
        cost = layout_cost(self.context, base.layout(parallel, microbatch))
        return Estimate(True, fits(self.context, cost.peak, cost.host), cost.seconds.step if cost.seconds else None, cost.peak)

    def _breaks_step_rules(self, parallel: Parallel, microbatch: int) -> bool:
        """Whether a layout breaks a rule that reads its micro-batch or its recomputation."""
        key = (_step_key(parallel), microbatch)
        found = self._is_broken.get(key)
        if found is None:
            found = self._is_broken[key] = bool(broken_rules(self.context.run, parallel, microbatch, OF_STEP))
        return found

    def _base(self, parallel: Parallel) -> LayoutBase | None:
        """The base of a layout whose step is legal; None where it breaks another rule."""
        key = base_key(parallel)
        try:
            return self._bases[key]
        except KeyError:
            run, microbatch = self.context.run, 1  # which these rules do not read
            is_legal = not broken_rules(run, parallel, microbatch, OF_BASE)
            found = self._bases[key] = LayoutBase(engine_for(run, parallel)[0], self.context, parallel) if is_legal else None
            return found
