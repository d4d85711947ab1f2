"""Whether a run fits in memory."""

from __future__ import annotations

from ...trainer.plan.costs.cost_context import CostContext
from ...trainer.plan.layout_cost import layout_cost
from ...trainer.plan.rules.rules import broken_rules
from ...trainer.plan.run_layout import run_layout
from ...trainer.spec.run import Run


def fits(run: Run) -> bool:
    """Whether a run is legal and fits in memory."""
    if broken_rules(run, run.parallel, run.train.microbatch):
        return False
    context = CostContext(run)
    return layout_cost(context, run_layout(context, run.parallel, run.train.microbatch)).peak <= context.capacity
