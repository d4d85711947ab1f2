"""The layout of a run under given degrees."""

from __future__ import annotations

from ..models.families import family_of
from ..spec.compiled_layers import has_compiled_layers
from ..spec.run import Parallel, Run
from .axes.axis import ActivationForm
from .costs.cost_context import CostContext
from .engines import cost_model, engine_for
from .engines.engine_row import EngineRow
from .layout.layout import LayerPartition, Layout, mesh_of
from .layout.schedule_of_run import delay_of, schedule_of


def layout_of_run(context: CostContext, parallel: Parallel, microbatch: int) -> Layout:
    """The layout of legal degrees, costed as the engine that runs it."""
    row, _ = engine_for(context.run, parallel)
    return layout_on(row, context, parallel, microbatch)


def layout_on(row: EngineRow | None, context: CostContext, parallel: Parallel, microbatch: int) -> Layout:
    """The layout of legal degrees, costed as this engine; without one, as the papers do."""
    mesh = mesh_of(parallel, context.world)
    shard = mesh.size("data") if parallel.shard == "all" else parallel.shard
    micros = context.run.train.batch // (mesh.dp * microbatch)
    engine = row.name if row else None
    return Layout(
        parallel=parallel,
        mesh=mesh,
        wires=context.wires(mesh),
        micros=micros,
        microbatch=microbatch,
        partition=stage_partition(context, parallel),
        schedule=schedule_of(parallel),
        delay=delay_of(parallel),
        shard=shard,
        expert_shard=max(1, shard // mesh.ep),
        engine=engine,
        form=activation_form(context.run, parallel, row),
        fused=context.run.train.compile if row is None else has_compiled_layers(context.run.train, parallel),
        gradient_sync=cost_model(engine).gradient_path(context, parallel, micros),
    )


def stage_partition(context: CostContext, parallel: Parallel) -> LayerPartition:
    """The layers of each stage."""
    stages = parallel.pp
    if stages == 1:
        return context.partition(1, folded=False)
    folded = schedule_of(parallel).folded
    return context.partition(stages, chunks=1 if folded else parallel.chunks, folded=folded, given=parallel.stages)


def activation_form(run: Run, parallel: Parallel, engine: EngineRow | None) -> ActivationForm:
    """Whose saved activations are counted: those of our modules where an engine here runs them, else the papers'.

    A compiled layer saves what the papers count (min-cut partitioning, traced on fake CUDA tensors). Where its graph breaks it is counted
    as if it were not compiled.
    """
    family = family_of(run.model)
    if engine is None or not engine.engine_class or not family.states_saved:
        return "megatron"
    whole = has_compiled_layers(run.train, parallel) and not run.model.experts
    return "compiled" if whole else "torch"
