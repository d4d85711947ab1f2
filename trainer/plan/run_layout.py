"""The layout of a run under given degrees."""

from __future__ import annotations

from ..spec.run import Parallel
from .costs.cost_context import CostContext
from .engines import cost_model, engine_for
from .layout.layout import Layout, mesh_of
from .layout.schedules import SCHEDULES


def run_layout(context: CostContext, parallel: Parallel, microbatch: int) -> Layout:
    """The layout of legal degrees, costed as the engine that runs it."""
    mesh = mesh_of(parallel, context.world)
    shard = mesh.size("data") if parallel.shard == "all" else parallel.shard
    micros = context.run.train.batch // (mesh.dp * microbatch)
    row, _ = engine_for(context.run, parallel)
    engine = row.name if row else None
    return Layout(
        parallel=parallel,
        mesh=mesh,
        wires=context.wires(mesh),
        micros=micros,
        microbatch=microbatch,
        partition=context.partition(mesh.pp, folded=mesh.pp > 1 and SCHEDULES[parallel.schedule].folded),
        shard=shard,
        expert_shard=max(1, shard // mesh.ep),
        engine=engine,
        gradient_sync=cost_model(engine).gradient_path(context, parallel, micros),
    )
