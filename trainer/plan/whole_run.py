"""The length and the cost of a whole run: of each of its batches the steps and their time."""

from __future__ import annotations

from ..spec.derived.batch_levels import levels_of_run
from ..spec.derived.data_blends import tokens_of_sources, tokens_of_stages
from .costs.checkpoint import saved_width, spared_width
from .costs.cost_context import CostContext
from .gpu_hours_cost import gpu_hours_cost
from .layout.layout import Layout
from .layout_cost import StepSeconds, layout_cost
from .layout_of_run import layout_at_batch
from .plan_data import BatchLevel, PathOfRun, StageOfRun, WholeRun


def plan_whole_run(context: CostContext, layout: Layout, seconds: StepSeconds | None, errors: int = 0) -> WholeRun:
    """Return the length and the cost of the whole run of a layout, whose checkpoints keep `errors` bytes of compression; None: the seconds
    of a step of train.batch are not known."""
    run = context.run
    train, device = run.train, run.cluster.device
    levels = tuple([_level(context, layout, each.batch, each.steps, seconds) for each in levels_of_run(train)])
    tokens = sum([each.tokens for each in levels])
    flops = context.flops_per_token * tokens
    peak = device.peak.get(train.precision)
    changes = bool(run.data.stages)
    total = sum([each.steps * (each.step or 0.0) for each in levels]) if seconds else None
    return WholeRun(
        steps=sum([each.steps for each in levels]),
        tokens=tokens,
        flops=flops,
        ideal_seconds=flops / (peak * context.world) if peak else None,
        seconds=total,
        days=total / 86400 if total is not None else None,
        cost=gpu_hours_cost(run.cluster, total) if total is not None else None,
        checkpoint_bytes=context.trained_parameters * saved_width(context)
        - context.spared_elements * spared_width(context)
        + (context.layers + context.table.modules) * context.layer_constants
        + errors,
        mfu=flops / (peak * context.world * total) if peak and total else None,
        levels=levels if train.rampup.batches else (),
        stages=tuple([StageOfRun(tokens=many, weights=weights) for many, weights in tokens_of_stages(run.data, tokens)]) if changes else (),
        paths=tuple([PathOfRun(tokens=each) for each in tokens_of_sources(run.data, tokens)]) if changes else (),
    )


def _level(context: CostContext, layout: Layout, batch: int, steps: int, seconds: StepSeconds | None) -> BatchLevel:
    """The steps of one batch, whose micro-batches are those of the layout, and fewer."""
    train = context.run.train
    here = layout if batch == train.batch else layout_at_batch(context, layout, batch)
    found = seconds if here is layout or seconds is None else layout_cost(context, here).seconds
    return BatchLevel(
        batch=batch, microbatches=here.micros, steps=steps, tokens=steps * batch * train.seq, step=found.step if found else None
    )
