"""The layout of a run under given degrees."""

from __future__ import annotations

from ..spec.run import Parallel
from .cost_context import CostContext
from .engines import cost_model, engine_for
from .layout import Layout, mesh_of
from .schedules import SCHEDULES


def run_layout(frame: CostContext, parallel: Parallel, microbatch: int) -> Layout:
    """The layout of legal degrees, costed as the engine that runs it."""
    mesh = mesh_of(parallel, frame.world)
    shard = mesh.size("data") if parallel.shard == "all" else parallel.shard
    micros = frame.run.train.batch // (mesh.dp * microbatch)
    row, _ = engine_for(frame.run, parallel)
    engine = row.name if row else None
    return Layout(
        parallel=parallel,
        mesh=mesh,
        wires=frame.wires(mesh),
        micros=micros,
        microbatch=microbatch,
        partition=frame.partition(mesh.pp, folded=mesh.pp > 1 and SCHEDULES[parallel.schedule].folded),
        shard=shard,
        expert_shard=max(1, shard // mesh.ep),
        engine=engine,
        gradient_sync=cost_model(engine).gradient_path(frame, parallel, micros),
    )
