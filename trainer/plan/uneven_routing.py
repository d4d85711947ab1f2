"""What a plan says of a mixture's routing: which load of a rank of experts it counts, and up to which load memory suffices."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from ..models.families import has_experts
from ..spec.changed_run import with_values
from ..spec.problem import Problem
from ..spec.run import Model, Run
from .costs.cost_context import CostContext
from .layout.layout import Layout
from .layout_cost import fits, host_bytes, layout_blocks, peak_bytes
from .stage_cost import StageCost, stage_costs

STEP = 0.01  # of an even share, to which the load is found


def largest_ep_load(context: CostContext, layout: Layout) -> float | None:
    """Return the largest load of a rank of experts (parallel.ep_load) that fits into memory, rounded down to STEP, or the most that there
    can be; None where no ranks share out experts, or where even routing does not fit."""
    model, ranks = context.run.model, layout.mesh.ep
    if ranks == 1 or not has_experts(model):
        return None
    room = _room(context, layout, 1.0)
    if room < 0 or not fits(context, 0, host_bytes(context, layout, _kinds(context, layout))):
        return None
    most = min(float(ranks), model.most_ep_load)
    lacks = -_room(context, layout, most)
    if lacks <= 0:
        return most
    low, high = round(1 / STEP), ceil(most / STEP)  # in steps: the first fits, the second does not
    while high - low > 1:  # bytes grow nearly in proportion
        between = min(max(low + int((high - low) * room / (room + lacks)), low + 1), high - 1)
        found = _room(context, layout, between * STEP)
        if found >= 0:
            low, room = between, found
        else:
            high, lacks = between, -found
    return round(low * STEP, 2)


def routing_warnings(run: Run, ranks: int, most: float | None) -> Iterator[Problem]:
    """Yield what is planned of the routing over so many ranks of experts, where memory suffices up to a load of `most`."""
    model, load = run.model, min(run.parallel.ep_load, ranks)
    if not has_experts(model):
        return
    if ranks > 1 and load == 1:
        says = f"expert ranks are planned for even routing, {model.experts} experts over {ranks} ranks"
        yield Problem(rule="routing", says=f"{says}{_enough_memory(model, ranks, most)}")
    elif ranks > 1:
        says = f"the busiest rank of experts is planned to compute {load:g} times an even share (parallel.ep_load)"
        yield Problem(rule="routing", says=f"{says}{_enough_memory(model, ranks, most)}")
    if model.capacity is not None:
        yield Problem(rule="capacity", says=f"model.capacity={model.capacity:g}: planned as if no token were dropped")
    if model.top_k < model.experts and not (model.weights or model.aux_loss or model.router.steps_bias):
        says = "nothing evens out the experts' loads: model.aux_loss and model.router.bias_rate are 0"
        yield Problem(rule="balance", says=says, mend="set model.aux_loss=0.01")


def _enough_memory(model: Model, ranks: int, most: float | None) -> str:
    if most is None:
        return ""
    is_any = most == min(ranks, model.most_ep_load)
    return f"; memory suffices for {'any routing' if is_any else f'parallel.ep_load={most:.2f}'}"


def _room(context: CostContext, layout: Layout, load: float) -> int:
    """Return the bytes that the fullest rank has left where one of experts has this load; negative: that it lacks."""
    given = layout._replace(parallel=with_values(layout.parallel, ep_load=load))
    return context.capacity - peak_bytes(context, given, _kinds(context, given))[0]


def _kinds(context: CostContext, layout: Layout) -> list[StageCost]:
    return stage_costs(context, layout, layout_blocks(context, layout), layout.partition.kinds)
