"""What a run on preferences does beside its steps: a forward pass for the reference, before the first one."""

from __future__ import annotations

from .costs.cost_context import CostContext
from .layout.layout import Layout
from .layout_cost import LayoutCost
from .plan_data import PreferencePlan


def plan_preferences(context: CostContext, layout: Layout, cost: LayoutCost, steps: int) -> PreferencePlan | None:
    """Return the loss on preferences of a run of so many steps, and the seconds of its reference; None where it trains on none."""
    if not context.run.data.has_preferences:
        return None
    preference = context.run.train.preference
    seconds = _reference_seconds(context, layout, cost, steps) if preference.has_reference else 0.0
    return PreferencePlan(loss=preference.loss, beta=preference.beta, reference_seconds=seconds)


def _reference_seconds(context: CostContext, layout: Layout, cost: LayoutCost, steps: int) -> float | None:
    """Return the seconds of the forwards of all sequences that a run reads, if it reads none twice: stages compute one micro-batch behind
    another. None: rates are not known."""
    if cost.seconds is None:
        return None
    train = context.run.train
    batches = steps + (context.run.data.evaluated_sets * train.evaluate.batches if train.evaluate.every else 0)
    rounds = batches * (train.batch // (layout.mesh.dp * layout.microbatch))
    forwards = [each.passes.forward + each.passes.message_forward for each in cost.kinds]
    filling = sum(many * each for many, each in zip(layout.partition.stages_of_kind, forwards, strict=True)) - max(forwards)
    return rounds * max(forwards) + filling
