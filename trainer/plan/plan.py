"""The plan of a run: everything that can be known before a device is asked."""

from __future__ import annotations

from math import ceil
from typing import Any

from ..spec.problem import Problem
from ..spec.run import Run
from .cost_context import CostContext
from .engines import engine_for
from .fixes import memory_problem, problems_with_fixes
from .layout import Layout
from .layout_cost import LayoutCost, StepSeconds, extra_weight_copies, in_flight, layout_cost, stage_bytes
from .mesh import Mesh
from .precision import moment_bytes
from .result import Memory, MemoryBytes, ModelFacts, Plan, StageMemory, StepTime, Throughput, WholeRun
from .rules import broken_rules
from .run_layout import run_layout
from .save_interval import plan_saving, save_warnings
from .schedules import SCHEDULES, bubble_share
from .traffic import busiest_traffic
from .warnings import warnings

VERSION = 1
WEIGHT = 4  # bytes a parameter in a checkpoint: float32


def make_plan(run: Run) -> Plan:
    """The plan of a run. Deterministic: each rank makes the same one again."""
    found = broken_rules(run, run.parallel, run.train.microbatch)
    if found:
        return _unlaid(run, problems_with_fixes(run, found))
    parallel = run.parallel
    frame = CostContext(run)
    layout = run_layout(frame, parallel, run.train.microbatch)
    of = layout_cost(frame, layout)
    memory = _memory(frame, layout, of)
    engine, limits = engine_for(run, parallel)
    seconds = of.seconds
    throughput = _throughput(frame, layout, seconds) if seconds else None
    fits = memory.peak <= memory.capacity
    whole, step = _whole(frame, seconds), seconds.step if seconds else None
    saved = plan_saving(run, whole, step)
    return Plan(
        **_named(run, layout.mesh),
        ok=True,
        fits=fits,
        runnable=engine is not None and not limits,
        problems=() if fits else (memory_problem(run, memory),),
        warnings=(*warnings(frame, layout, of, throughput), *save_warnings(run, whole, step, saved)),
        engine=engine.name if engine else None,
        microbatches=layout.micros,
        model=_facts(frame),
        memory=memory,
        traffic=busiest_traffic(frame, layout, of),
        time=_time(seconds) if seconds else None,
        bubble_fraction=seconds.fill if seconds else _even_bubble(layout),
        throughput=throughput,
        run=whole,
        saving=saved,
    )


def _unlaid(run: Run, found: tuple[Problem, ...]) -> Plan:
    """The plan of a run that can't be laid out: its problems, and nothing counted."""
    return Plan(
        **_named(run, None),
        ok=False,
        fits=None,
        runnable=False,
        problems=found,
        warnings=(),
        engine=None,
        microbatches=None,
        model=None,
        memory=None,
        traffic=(),
        time=None,
        bubble_fraction=None,
        throughput=None,
        run=None,
        saving=None,
    )


def _named(run: Run, mesh: Mesh | None) -> dict[str, Any]:
    cluster = run.cluster
    return {
        "version": VERSION,
        "name": run.name,
        "reading": run.reading,
        "world": cluster.nodes * cluster.gpus,
        "nodes": cluster.nodes,
        "gpus": cluster.gpus,
        "device": cluster.device.name,
        "mesh": _mesh(mesh) if mesh else None,
        "groups": _groups(mesh, cluster.gpus) if mesh else {},
        "schedule": run.parallel.schedule,
    }


def _time(seconds: StepSeconds) -> StepTime:
    return StepTime(
        step=seconds.step,
        compute=seconds.compute,
        exposed=seconds.exposed,
        bubble=seconds.bubble,
        optimizer=seconds.optimizer,
    )


def _even_bubble(layout: Layout) -> float:
    return bubble_share(SCHEDULES[layout.parallel.schedule], layout.mesh.pp, layout.micros, layout.parallel.chunks)


def _mesh(mesh: Mesh) -> dict[str, int]:
    return dict(mesh.degrees)


def _groups(mesh: Mesh, gpus: int) -> dict[str, str]:
    """How each axis's groups lie on the nodes, in words."""
    words: dict[str, str] = {}
    for axis in mesh.degrees:
        size, in_node = mesh.size(axis), mesh.in_node(axis, gpus)
        if size > 1:
            words[axis] = f"{size} ranks inside a node" if size <= in_node else f"{size} ranks, {in_node} in a node"
    return words


def _facts(frame: CostContext) -> ModelFacts:
    return ModelFacts(
        parameters=frame.parameters,
        active_parameters=frame.active_parameters,
        flops_per_token=frame.flops_per_token,
    )


def _memory(frame: CostContext, layout: Layout, of: LayoutCost) -> Memory:
    rows = []
    for index, at in enumerate(layout.partition.kind_of_stage):
        kind = of.kinds[at]
        flight = in_flight(layout, index)
        kept = ceil(kind.saved * flight)
        held = MemoryBytes(
            weights=kind.weights * (1 + extra_weight_copies(layout, index)),
            gradients=kind.gradients,
            optimizer=kind.optimizer,
            activations=kept + kind.saved_last,
            logits=kind.logits,
            buffers=kind.buffers + ceil((kind.saved + kind.passing) * flight) - kept,
            overhead=kind.overhead,
            total=stage_bytes(layout, kind, index),
        )
        layers, *back = map(layout.layers, layout.parts(index))
        rows.append(
            StageMemory(
                index=index, layers=layers, parameters=kind.parameters, in_flight=flight, bytes=held, back=back[0] if back else None
            )
        )
    return Memory(peak=of.peak, capacity=frame.capacity, stage=of.fullest, form=frame.form, stages=tuple(rows))


def _throughput(frame: CostContext, layout: Layout, seconds: StepSeconds) -> Throughput:
    run = frame.run
    rate = run.train.batch * run.train.seq / seconds.step
    each = rate / frame.world
    peak = run.cluster.device.peak[run.train.precision]
    model = each * frame.flops_per_token
    hardware = each * (frame.flops_per_token + frame.recompute_flops_per_token(layout.parallel.recompute))
    return Throughput(
        tokens_per_second=rate,
        tokens_per_second_per_gpu=each,
        model_flops_per_second_per_gpu=model,
        hardware_flops_per_second_per_gpu=hardware,
        mfu=model / peak,
        hfu=hardware / peak,
    )


def _whole(frame: CostContext, seconds: StepSeconds | None) -> WholeRun:
    train, device = frame.run.train, frame.run.cluster.device
    step = train.batch * train.seq
    steps = train.steps or ceil((train.tokens or 0) / step)
    flops = frame.flops_per_token * steps * step
    peak = device.peak.get(train.precision)
    whole = steps * seconds.step if seconds else None
    return WholeRun(
        steps=steps,
        tokens=steps * step,
        flops=flops,
        ideal_seconds=flops / (peak * frame.world) if peak else None,
        seconds=whole,
        days=whole / 86400 if whole is not None else None,
        checkpoint_bytes=frame.parameters * (WEIGHT + moment_bytes(frame.run.optim)),
    )
