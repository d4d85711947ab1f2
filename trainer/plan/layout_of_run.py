"""The layout of a run under given degrees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

from ..models.families import family_of
from ..spec.derived.compiled_layers import has_compiled_layers
from ..spec.run import Parallel, Run
from .axes.axis import ActivationForm
from .axes.dp import GradientSync
from .costs.cost_context import CostContext
from .engines import cost_model, engine_for
from .engines.engine_row import EngineRow
from .layout.gradient_routes import inner_ranks, server_count
from .layout.layout import LayerPartition, Layout, mesh_of
from .layout.mesh import Mesh
from .layout.schedule_of_run import delay_of, schedule_of
from .layout.workers import worker_ranks


def _keys(section: Any, at: str = "") -> Iterator[str]:
    """Yield the keys of a section and of those within it."""
    for field in fields(section):
        value, key = getattr(section, field.name), at + field.name
        yield from _keys(value, f"{key}.") if is_dataclass(value) else (key,)


base_key = attrgetter(*[key for key in _keys(Parallel()) if key != "recompute"])
"""Parallel -> all that decides the base of a layout."""


class LayoutBase:
    """What the layouts of a run share that differ in micro-batch and recomputation only."""

    def __init__(self, row: EngineRow | None, context: CostContext, parallel: Parallel) -> None:
        """The base of legal degrees, costed as this engine; without one, as the papers do."""
        self.context, self.engine = context, row.name if row else None
        self.mesh = mesh_of(parallel, context.world)
        self.wires = context.wires(self.mesh)
        self.partition = stage_partition(context, parallel)
        self.schedule, self.delay = schedule_of(parallel), delay_of(parallel)
        self.worker = worker_ranks(parallel, self.mesh, context.run.cluster.gpus)
        self.shard = self.worker if parallel.shard == "all" else parallel.shard
        self.form = activation_form(context.run, parallel, row)
        self.fused = context.run.train.compile if row is None else has_compiled_layers(context.run.train, parallel)
        self._steps: dict[int, tuple[int, GradientSync]] = {}

    def layout(self, parallel: Parallel, microbatch: int) -> Layout:
        """The layout of degrees that have this base."""
        step = self._steps.get(microbatch)
        if step is None:
            step = self._steps[microbatch] = self._step(parallel, microbatch)
        return Layout(
            parallel=parallel,
            microbatch=microbatch,
            micros=step[0],
            gradient_sync=step[1],
            mesh=self.mesh,
            wires=self.wires,
            partition=self.partition,
            schedule=self.schedule,
            delay=self.delay,
            shard_ranks=self.shard,
            expert_shard_ranks=max(1, self.shard // self.mesh.ep),
            worker_ranks=self.worker,
            engine=self.engine,
            form=self.form,
            fused=self.fused,
        )

    def _step(self, parallel: Parallel, microbatch: int) -> tuple[int, GradientSync]:
        """(micro-batches of a replica in a step, how its gradients travel)."""
        micros = self.context.run.train.batch // (self.mesh.dp * microbatch)
        return micros, _gradient_sync(self.context, self.engine, parallel, self.mesh, micros)


def _gradient_sync(context: CostContext, engine: str | None, parallel: Parallel, mesh: Mesh, micros: int) -> GradientSync:
    """How the gradients of a step with so many micro-batches travel."""
    path, alone = cost_model(engine).gradient_path(context, parallel, micros), mesh.size("data") == 1
    return path._replace(
        staleness=0 if alone else parallel.staleness,
        inner=inner_ranks(parallel, mesh, context.run.cluster.gpus),
        servers=server_count(parallel, mesh),
    )


def layout_at_batch(context: CostContext, layout: Layout, batch: int) -> Layout:
    """The layout in a step that trains another batch, in more or fewer micro-batches of the same size."""
    micros = batch // (layout.mesh.dp * layout.microbatch)
    return layout._replace(micros=micros, gradient_sync=_gradient_sync(context, layout.engine, layout.parallel, layout.mesh, micros))


def layout_of_run(context: CostContext, parallel: Parallel, microbatch: int) -> Layout:
    """The layout of legal degrees, costed as the engine that runs it."""
    row, _ = engine_for(context.run, parallel)
    return layout_on(row, context, parallel, microbatch)


def layout_on(row: EngineRow | None, context: CostContext, parallel: Parallel, microbatch: int) -> Layout:
    """The layout of legal degrees, costed as this engine; without one, as the papers do."""
    return LayoutBase(row, context, parallel).layout(parallel, microbatch)


def stage_partition(context: CostContext, parallel: Parallel) -> LayerPartition:
    """The layers of each stage."""
    stages = parallel.pp
    if stages == 1:
        return context.partition(1, folded=False)
    folded = schedule_of(parallel).folded
    return context.partition(stages, chunks=1 if folded else parallel.chunks, folded=folded, given=parallel.stages)


def activation_form(run: Run, parallel: Parallel, engine: EngineRow | None) -> ActivationForm:
    """Whose saved activations are counted: those of our modules where an engine here runs them, else the papers'.

    A compiled layer saves what the papers count (min-cut partitioning, traced on fake CUDA tensors). A mixture's, whose graph breaks, is
    counted as if it were not compiled, but for gated activations (local_tensors.py).
    """
    family = family_of(run.model)
    if engine is None or not engine.engine_class or not family.states_saved:
        return "megatron"
    whole = has_compiled_layers(run.train, parallel) and not run.model.experts
    return "compiled" if whole else "torch"
