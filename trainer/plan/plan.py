"""The plan of a run: everything that can be known before a device is asked."""

from __future__ import annotations

from math import ceil
from typing import Any

from ..spec.problem import Problem
from ..spec.run import Run
from .axes import pp
from .axes.line import Line
from .collectives import Wire, cost
from .costs import Costs, Seconds, costs, handed, sends, spare
from .engines import engine_for, unbuilt
from .frame import Frame
from .layout import Layout
from .mends import memory_problem, problem_of
from .mesh import Mesh
from .precision import moments
from .result import Bytes, Memory, Message, ModelFacts, Plan, StageMemory, Throughput, Time, Whole
from .rules import broken
from .schedules import SCHEDULES, bubble_share
from .warn import warnings

VERSION = 1
WEIGHT = 4  # bytes a parameter in a checkpoint: float32


def make_plan(run: Run) -> Plan:
    """The plan of a run. Deterministic: each rank makes the same one again."""
    found = broken(run, run.parallel, run.train.microbatch)
    if found:
        return _unlaid(run, tuple(problem_of(run, each, found) for each in found))
    parallel = run.parallel
    frame = Frame(run)
    layout = frame.layout(parallel, run.train.microbatch)
    of = costs(frame, layout)
    memory = _memory(frame, layout, of)
    engine, limits = engine_for(run, parallel)
    seconds = of.seconds
    throughput = _throughput(frame, layout, seconds) if seconds else None
    fits = memory.peak <= memory.capacity
    return Plan(
        **_named(run, layout.mesh),
        ok=True,
        fits=fits,
        runnable=engine is not None and not limits and not any(unbuilt(engine, parallel)),
        problems=() if fits else (memory_problem(run, memory),),
        warnings=warnings(frame, layout, of, throughput),
        engine=engine.name if engine else None,
        microbatches=layout.micros,
        model=_facts(frame),
        memory=memory,
        traffic=tuple(_message(line, timed=seconds is not None) for line in _traffic(frame, layout, of)),
        time=_time(seconds) if seconds else None,
        bubble_fraction=seconds.fill if seconds else _even_bubble(layout),
        throughput=throughput,
        run=_whole(frame, seconds),
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
    copies = spare(layout) or [0] * layout.mesh.pp
    rows = []
    for index, at in enumerate(layout.partition.which):
        kind = of.kinds[at]
        held = Bytes(
            weights=kind.weights * (1 + copies[index]),
            gradients=kind.gradients,
            optimizer=kind.optimizer,
            activations=ceil(kind.kept * of.flights[index]) + kind.kept_last,
            logits=kind.logits,
            buffers=kind.buffers,
            overhead=kind.overhead,
            total=of.peaks[index],
        )
        rows.append(
            StageMemory(index=index, layers=layout.layers(index), parameters=kind.parameters, in_flight=of.flights[index], bytes=held)
        )
    peak = max(of.peaks)
    return Memory(peak=peak, capacity=frame.capacity, stage=of.peaks.index(peak), form=frame.form, stages=tuple(rows))


def _traffic(frame: Frame, layout: Layout, of: Costs) -> list[Line]:
    """Every message of a step on the rank that sends most."""
    one_of_each = [layout.partition.which.index(at) for at in range(len(of.kinds))]
    return max((_stage_traffic(frame, layout, of, index) for index in one_of_each), key=lambda lines: sum(line.sent for line in lines))


def _stage_traffic(frame: Frame, layout: Layout, of: Costs, index: int) -> list[Line]:
    partition, pieces, stages = layout.partition, of.pieces, layout.mesh.pp
    kind = of.kinds[partition.which[index]]
    lines = list(kind.data)
    if stages > 1:
        pair = layout.wires.pair
        lines += pp.lines(handed(layout, pieces), sends(layout, index), pair, exposed=not layout.parallel.overlap.pipeline)
        if pieces.tied and index in (0, stages - 1):
            lines += pp.tied(pieces.tied * frame.widths.gradient, pair)
    blocks = [(partition.counts[index], pieces.layer)]
    blocks += [(1, pieces.embedding)] * (index == 0) + [(1, pieces.head)] * (index == stages - 1)
    spoken: dict[tuple[str, str, int], int] = {}
    for many, piece in blocks:
        for talk in piece.talks:
            key = (talk.axis, talk.verb, talk.payload)
            spoken[key] = spoken.get(key, 0) + many * (talk.forward + talk.backward) * layout.micros
    talked = layout.micros * (kind.talk_forward + kind.talk_backward)
    lines += _spoken(layout, spoken, talked)
    return lines


def _spoken(layout: Layout, spoken: dict[tuple[str, str, int], int], exposed: float) -> list[Line]:
    """The messages inside blocks; what of their seconds is exposed is shared out among them by their length."""
    rows = []
    for (axis, verb, payload), times in spoken.items():
        wire: Wire = getattr(layout.wires, axis)
        sent, seconds = cost(verb, payload, wire)
        rows.append((axis, verb, payload, times, sent * times, wire.link, seconds * times))
    whole = sum(row[-1] for row in rows)
    return [Line(*row, exposed * row[-1] / whole if whole else 0.0) for row in rows]


def _message(line: Line, *, timed: bool) -> Message:
    return Message(
        axis=line.axis,
        verb=line.verb,
        payload=line.payload,
        count=line.times,
        sent=line.sent,
        link=line.link,
        seconds=line.seconds if timed else None,
        exposed=line.exposed if timed else None,
    )


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
