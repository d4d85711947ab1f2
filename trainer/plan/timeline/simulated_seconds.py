"""The length of a simulated step without its events, for callers that need it many times."""

from __future__ import annotations

from random import Random
from statistics import fmean, stdev

from ..layout.step_order import StepOrder, step_order
from .make_timeline import AS_PLANNED, PassDuration, Slowness, make_timeline, pass_durations, send_delay, step_schedule
from .step_costs import StepCosts

LEAST_SHARE = 0.2  # of its planned time, that a pass takes at least, however it varies


def simulated_seconds(costs: StepCosts, slowness: Slowness = AS_PLANNED) -> float:
    """Return the seconds of the step that `make_timeline` simulates."""
    layout = costs.layout
    if layout.delay:
        return make_timeline(costs, slowness).seconds
    order, durations = _order(costs), pass_durations(costs, slowness)
    ends = order.ends([durations[key].total for key in order.durations], send_delay(costs))
    return _end_of_step(costs, order, ends)


def varied_seconds(costs: StepCosts, variation: float, steps: int) -> tuple[float, float]:
    """Return (the mean of so many steps, its standard error) where the computation of passes varies.

    Each pass of a schedule that flushes is drawn from a normal distribution around the planned one, with a standard deviation of this share
    of it. Steps are drawn in pairs, of which the second varies the other way, so that half of the noise cancels.
    """
    order, durations, random = _order(costs), pass_durations(costs, AS_PLANNED), Random(0)
    planned = [durations[action] for action in (order.durations[step.duration] for step in order.steps)]
    pairs = []
    for _ in range(-(-steps // 2)):
        drawn = [variation * random.gauss(0.0, 1.0) for _ in planned]
        pairs.append(fmean(_varied_step(costs, order, planned, drawn, sign) for sign in (1, -1)))
    return fmean(pairs), stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else 0.0


def _varied_step(costs: StepCosts, order: StepOrder, planned: list[PassDuration], drawn: list[float], sign: int) -> float:
    seconds = [
        each.computing * max(LEAST_SHARE, 1 + sign * change) + each.messages + each.sending
        for each, change in zip(planned, drawn, strict=True)
    ]
    return _end_of_step(costs, order, order.ends_of_actions(seconds, send_delay(costs)))


def _order(costs: StepCosts) -> StepOrder:
    layout = costs.layout
    return step_order(step_schedule(layout), layout.mesh.pp, layout.micros, layout.chunks)


def _end_of_step(costs: StepCosts, order: StepOrder, ends: list[float]) -> float:
    """The end of a step whose actions end then: sums, the norm for which all wait, the optimizer's step, gathers."""
    summed = [ends[last] + end.sums for last, end in zip(order.last, costs.ends, strict=True)]
    if costs.tied:
        summed.append(max(summed[0], summed[-1]) + costs.tied)
    return max(summed) + max(end.step + end.gather for end in costs.ends) + costs.host
