"""The length of a simulated step without its events, for what asks many times."""

from __future__ import annotations

from random import Random

from ..layout.step_order import StepOrder, step_order
from .make_timeline import AS_PLANNED, Slowness, latency, make_timeline, pass_durations
from .step_costs import StepCosts

LEAST_SHARE = 0.2  # of its planned time, that a pass takes at least, however it varies


def step_seconds(costs: StepCosts, slowness: Slowness = AS_PLANNED) -> float:
    """Return the seconds that `make_timeline` would say."""
    layout = costs.layout
    if layout.delay:
        return make_timeline(costs, slowness).seconds
    order, durations = _order(costs), pass_durations(costs, slowness)
    ends = order.ends([durations[key].total for key in order.durations], latency(costs))
    return _end_of_step(costs, order, ends)


def varied_step_seconds(costs: StepCosts, variation: float, seed: int) -> float:
    """Return the seconds of a step that flushes, whose passes' computation varies: each is drawn from a normal distribution around the
    planned one with a standard deviation of this share of it."""
    order, durations, random = _order(costs), pass_durations(costs, AS_PLANNED), Random(seed)
    planned = [durations[key] for key in order.durations]
    seconds = []
    for action in order.steps:
        computing, messages, sending = planned[action.duration]
        seconds.append(computing * max(LEAST_SHARE, random.gauss(1.0, variation)) + messages + sending)
    return _end_of_step(costs, order, order.ends_of_actions(seconds, latency(costs)))


def _order(costs: StepCosts) -> StepOrder:
    layout = costs.layout
    return step_order(layout.schedule, layout.mesh.pp, layout.micros, layout.chunks)


def _end_of_step(costs: StepCosts, order: StepOrder, ends: list[float]) -> float:
    """The end of a step whose actions end then: sums, the norm for which all wait, the optimizer's step, gathers."""
    summed = [ends[last] + end.sums for last, end in zip(order.last, costs.ends, strict=True)]
    if costs.tied:
        summed.append(max(summed[0], summed[-1]) + costs.tied)
    return max(summed) + max(end.step + end.gather for end in costs.ends) + costs.host
