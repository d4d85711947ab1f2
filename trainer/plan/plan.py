"""The plan of a run: everything that can be known before a device is asked."""

from __future__ import annotations

from math import ceil
from typing import Any

from ..spec.problem import Problem
from ..spec.run import Run
from .cost_context import Frame
from .engines import engine_for, unbuilt
from .layout import Layout
from .layout_cost import Costs, Seconds, costs, in_flight, spare, stage_bytes
from .mends import memory_problem, problems_of
from .mesh import Mesh
from .precision import moments
from .result import Bytes, Memory, ModelFacts, Plan, StageMemory, Throughput, Time, Whole
from .rules import broken
from .save_interval import ill_saved, saving
from .schedules import SCHEDULES, bubble_share
from .traffic import busiest
from .warnings import warnings

VERSION = 1
WEIGHT = 4  # bytes a parameter in a checkpoint: float32


def make_plan(run: Run) -> Plan:
    """The plan of a run. Deterministic: each rank makes the same one again."""
    found = broken(run, run.parallel, run.train.microbatch)
    if found:
        return _unlaid(run, problems_of(run, found))
    parallel = run.parallel
    frame = Frame(run)
    layout = frame.layout(parallel, run.train.microbatch)
    of = costs(frame, layout)
    memory = _memory(frame, layout, of)
    engine, limits = engine_for(run, parallel)
    seconds = of.seconds
    throughput = _throughput(frame, layout, seconds) if seconds else None
    fits = memory.peak <= memory.capacity
    whole, step = _whole(frame, seconds), seconds.step if seconds else None
    saved = saving(run, whole, step)
    return Plan(
        **_named(run, layout.mesh),
        ok=True,
        fits=fits,
        runnable=engine is not None and not limits and not any(unbuilt(engine, parallel)),
        problems=() if fits else (memory_problem(run, memory),),
        warnings=(*warnings(frame, layout, of, throughput), *ill_saved(run, whole, step, saved)),
        engine=engine.name if engine else None,
        microbatches=layout.micros,
        model=_facts(frame),
        memory=memory,
        traffic=busiest(frame, layout, of),
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


def _time(seconds: Seconds) -> Time:
    return Time(
        step=seconds.step,
        compute=seconds.compute,
        exposed=seconds.exposed,
        bubble=seconds.bubble,
        optimizer=seconds.optimizer,
    )


def _even_bubble(layout: Layout) -> float:
    return bubble_share(SCHEDULES[layout.parallel.schedule], layout.mesh.pp, layout.micros, layout.parallel.chunks)


def _mesh(mesh: Mesh) -> dict[str, int]:
    return {axis: getattr(mesh, axis) for axis in ("pp", "dp", "cp", "ep", "tp")}


def _groups(mesh: Mesh, gpus: int) -> dict[str, str]:
    """How each axis's groups lie on the nodes, in words."""
    words: dict[str, str] = {}
    for axis in ("pp", "dp", "cp", "ep", "tp"):
        size, in_node = mesh.size(axis), mesh.in_node(axis, gpus)
        if size > 1:
            words[axis] = f"{size} ranks inside a node" if size <= in_node else f"{size} ranks, {in_node} in a node"
    return words


def _facts(frame: Frame) -> ModelFacts:
    return ModelFacts(
        parameters=frame.parameters,
        active_parameters=frame.active_parameters,
        flops_per_token=frame.flops_per_token,
    )


def _memory(frame: Frame, layout: Layout, of: Costs) -> Memory:
    rows = []
    for index, at in enumerate(layout.partition.which):
        kind = of.kinds[at]
        flight = in_flight(layout, index)
        kept = ceil(kind.kept * flight)
        held = Bytes(
            weights=kind.weights * (1 + spare(layout, index)),
            gradients=kind.gradients,
            optimizer=kind.optimizer,
            activations=kept + kind.kept_last,
            logits=kind.logits,
            buffers=kind.buffers + ceil((kind.kept + kind.passing) * flight) - kept,
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


def _throughput(frame: Frame, layout: Layout, seconds: Seconds) -> Throughput:
    run = frame.run
    rate = run.train.batch * run.train.seq / seconds.step
    each = rate / frame.world
    peak = run.cluster.device.peak[run.train.precision]
    model = each * frame.flops_per_token
    hardware = each * (frame.flops_per_token + frame.again_flops_per_token(layout.parallel.recompute))
    return Throughput(
        tokens_per_second=rate,
        tokens_per_second_per_gpu=each,
        model_flops_per_second_per_gpu=model,
        hardware_flops_per_second_per_gpu=hardware,
        mfu=model / peak,
        hfu=hardware / peak,
    )


def _whole(frame: Frame, seconds: Seconds | None) -> Whole:
    train, device = frame.run.train, frame.run.cluster.device
    step = train.batch * train.seq
    steps = train.steps or ceil((train.tokens or 0) / step)
    flops = frame.flops_per_token * steps * step
    peak = device.peak.get(train.precision)
    whole = steps * seconds.step if seconds else None
    return Whole(
        steps=steps,
        tokens=steps * step,
        flops=flops,
        ideal_seconds=flops / (peak * frame.world) if peak else None,
        seconds=whole,
        days=whole / 86400 if whole is not None else None,
        checkpoint_bytes=frame.parameters * (WEIGHT + moments(frame.run.optim)),
    )
