"""A step simulated: its timeline, its critical path, and what would change it."""

from __future__ import annotations

from typing import NamedTuple

from ...spec.run import Run
from .critical_path import CriticalPath, critical_path, slowest_stage
from .make_timeline import AS_PLANNED, Slowness, make_timeline
from .step_costs import StepCosts
from .timeline import Timeline
from .what_if import WhatIf, what_ifs


class StepSimulation(NamedTuple):
    """One step of a run; `what_if` is empty where stages were made slow."""

    timeline: Timeline
    path: CriticalPath
    what_if: list[WhatIf]


def simulate_step(run: Run, costs: StepCosts, slowness: Slowness = AS_PLANNED) -> StepSimulation:
    """Return the simulated step of a legal run, whose costs these are."""
    timeline = make_timeline(costs, slowness)
    path = critical_path(timeline)
    return StepSimulation(timeline, path, [] if slowness else what_ifs(run, costs, slowest_stage(path)))
