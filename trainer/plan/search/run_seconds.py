"""The seconds by which a search ranks layouts: a step's, or where the batch grows (train.rampup) the whole run's as if they were a step's.

A run of levels, n steps of batch b each, takes T = sum n s, s the seconds of a step of that batch. Its samples are those of E = sum n b / B
steps of B = train.batch, so that T / E are the seconds for as many samples as such a step has. E is the same in every layout: T / E
ranks them as T does. Without a ramp-up it is the step.

A lower bound of a step of train.batch, of M micro-batches, bounds T / E too: that of a step of m < M micro-batches is m / M of it or more.
What it counts for each micro-batch is so, and what it counts once a step, or as waiting for other stages, does not fall with fewer. The one
exception: where only a run's large steps have so many micro-batches that closed forms must do (part_seconds.py), it is not proven that a
simulated wait is no shorter than theirs.
"""

from __future__ import annotations

from ...spec.derived.batch_levels import levels_of_run
from ...spec.run import Train
from ..costs.cost_context import CostContext
from ..layout.layout import Layout
from ..layout_cost import layout_cost
from ..layout_of_run import layout_at_batch


def whole_steps(train: Train) -> float:
    """Return how many steps of train.batch have as many samples as the whole run."""
    return sum([each.steps * each.batch for each in levels_of_run(train)]) / train.batch


def ranked_seconds(context: CostContext, layout: Layout, step: float) -> float:
    """Return the seconds by which a layout is ranked, a step of which takes `step` at train.batch."""
    train = context.run.train
    if not train.rampup.batches:
        return step
    total = 0.0
    for each in levels_of_run(train):
        at_batch = step if each.batch == train.batch else _step_seconds(context, layout, each.batch)
        total += each.steps * at_batch
    return total / whole_steps(train)


def _step_seconds(context: CostContext, layout: Layout, batch: int) -> float:
    found = layout_cost(context, layout_at_batch(context, layout, batch)).seconds
    assert found is not None  # that of train.batch is known
    return found.step


def share_of_several(train: Train, rank_samples: int) -> float:
    """Return the share of the run's samples that are in steps of several micro-batches, of `rank_samples` on all ranks together: a bound of
    what states cost with several micro-batches does not hold with one. 1 where each step has one micro-batch, or all have several."""
    if not train.rampup.batches or train.batch == rank_samples:
        return 1.0
    levels = levels_of_run(train)
    return sum([each.steps * each.batch for each in levels if each.batch > rank_samples]) / sum(
        [each.steps * each.batch for each in levels]
    )
