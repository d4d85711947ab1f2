"""Plans the runs of a report again, without a GPU, and holds today's plan to what was measured there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...cli.config.load import load_recipe
from ...trainer.loop.metrics.throughput import planned_figures
from ...trainer.plan.plan import make_plan
from .acceptance import Report
from .planned_runs import planned_measured

SLACK = 0.002  # a share by which a plan that missed the goal may move away from what was measured


def replan_departures(report: Report) -> Iterator[str]:
    """Yield where today's plan is further from a measured figure than the goal, and than the plan was when that was measured."""
    for row in report.rows:
        if not (row.name.startswith("plan ") and row.is_done):
            continue
        before, today = planned_measured(row.figures), planned_measured({**row.figures, **planned_today(row.figures)})
        for (what, measured, then, goal), (_, _, now, _) in zip(before, today, strict=True):
            if not measured or not then:
                continue
            if not now:
                yield f"{row.name}: {what} is not planned any more"
            elif abs(measured / now - 1) > max(goal, abs(measured / then - 1) + SLACK):
                yield f"{row.name}: {what} was measured {100 * (measured / now - 1):+.1f} % of today's plan, {_then(measured / then)} then"


def _then(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def planned_today(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return today's plan of a run, under the names of a report's figures."""
    plan = make_plan(load_recipe(figures["recipe"], figures["words"]))
    assert plan.memory is not None, plan.problems
    planned, held = planned_figures(plan), plan.memory.stages[plan.memory.stage].bytes
    return {
        "planned_memory": {
            "weights": held.weights,
            "gradients": held.gradients,
            "optimizer": held.optimizer,
            "activations": held.activations + held.logits,
        },
        "planned_memory_peak": planned["planned_memory_peak"],
        "planned_step_seconds": planned["planned_seconds"],
    }
