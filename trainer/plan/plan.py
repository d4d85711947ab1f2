"""The plan of a run: everything that can be computed before the run starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..spec.problem import Problem
from ..spec.run import Run
from .costs.cost_context import CostContext
from .documents_plan import plan_documents
from .engines import cost_model, engine_for, engine_reason
from .error_bars import Bar, Planned, memory_bar, step_bar
from .fixes import problems_with_fixes
from .layout.layout import Layout
from .layout.mesh import Mesh
from .layout.schedules import bubble_share
from .layout_cost import LayoutCost, StepSeconds, extra_weight_copies, fits, in_flight, kept_bytes, layout_cost, stage_bytes, uses_host
from .layout_of_run import layout_of_run
from .memory_fixes import memory_problem
from .plan_data import ErrorBar, HostMemory, Memory, MemoryBytes, ModelFacts, Plan, RankHostBytes, StageMemory, StepTime, Throughput
from .preference_plan import plan_preferences
from .rules.rules import broken_rules
from .save_interval import plan_saving, save_warnings
from .stage_cost import snapshot_bytes
from .step_operators import plan_operators
from .traffic import busiest_traffic
from .uneven_routing import largest_ep_load, routing_warnings
from .warnings import warnings
from .whole_run import plan_whole_run

PLAN_VERSION = 1


def make_plan(run: Run) -> Plan:
    """Return the plan of a run. It depends on the run alone, so every rank makes the same plan."""
    found = broken_rules(run, run.parallel, run.train.microbatch)
    if found:
        return _plan_without_layout(run, problems_with_fixes(run, found))
    parallel = run.parallel
    context = CostContext(run)
    layout = layout_of_run(context, parallel, run.train.microbatch)
    cost = layout_cost(context, layout)
    memory = _memory(context, layout, cost)
    engine, limits = engine_for(run, parallel)
    seconds = cost.seconds
    throughput = plan_throughput(context, layout, seconds) if seconds else None
    is_enough = fits(context, cost.peak, cost.host)
    errors = cost_model(layout.engine).saved_error_bytes(context, layout)
    whole, step = plan_whole_run(context, layout, seconds, errors), seconds.step if seconds else None
    whole = replace(whole, preferences=plan_preferences(context, layout, cost, whole.steps))
    saved = plan_saving(run, whole, step, largest_snapshot(context, layout, cost), forward_seconds(layout, cost))
    planned = Planned(run, parallel, engine.name if engine else None, memory.peak)
    return Plan(
        **_shared_fields(run, layout.mesh),
        ok=True,
        fits=is_enough,
        runnable=engine is not None and not limits,
        problems=() if is_enough else (memory_problem(run, memory),),
        warnings=(
            *warnings(context, layout, cost, throughput),
            *routing_warnings(run, layout.mesh.ep, memory.most_ep_load),
            *save_warnings(run, whole, step, saved),
        ),
        engine=engine.name if engine else None,
        engine_reason=engine_reason(run, parallel, engine.name) if engine and run.engine == "auto" else "",
        microbatches=layout.micros,
        model=_model_facts(context),
        memory=memory,
        traffic=busiest_traffic(context, layout, cost),
        time=_step_time(seconds) if seconds else None,
        operators=plan_operators(context, layout, cost),
        bubble_fraction=seconds.fill if seconds else _bubble_fraction(layout),
        throughput=throughput,
        run=whole,
        saving=saved,
        documents=plan_documents(context, layout, cost),
        **_bars(memory_bar(planned), step_bar(planned, seconds.step, seconds.optimizer) if seconds else None, whole=not memory.unknown),
    )


def _plan_without_layout(run: Run, found: tuple[Problem, ...]) -> Plan:
    """Return the plan of a run that breaks a rule: its problems; all figures are None."""
    return Plan(
        **_shared_fields(run, None),
        ok=False,
        fits=None,
        runnable=False,
        problems=found,
        warnings=(),
        engine=None,
        engine_reason="",
        microbatches=None,
        model=None,
        memory=None,
        traffic=(),
        time=None,
        bubble_fraction=None,
        throughput=None,
        run=None,
        saving=None,
        **_bars(None, None, whole=False),
    )


def _bars(memory: Bar | None, step: Bar | None, *, whole: bool) -> dict[str, Any]:
    """Return the ends of the error bars, and why they are so wide. Memory that is not all counted has no upper end."""
    bars = {"step": step, "memory": memory}
    return {
        "memory_low": round(memory.low) if memory else None,
        "memory_high": round(memory.high) if memory and whole else None,
        "step_low": step.low if step else None,
        "step_high": step.high if step else None,
        "bars": {
            name: ErrorBar(low=bar.rule.low, high=bar.rule.high, because=bar.rule.says, runs=bar.rule.runs, sources=bar.rule.sources)
            for name, bar in bars.items()
            if bar
        },
    }


def _shared_fields(run: Run, mesh: Mesh | None) -> dict[str, Any]:
    """Return the fields that a plan has with and without a layout."""
    cluster = run.cluster
    return {
        "version": PLAN_VERSION,
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


def _step_time(seconds: StepSeconds) -> StepTime:
    return StepTime(
        step=seconds.step,
        compute=seconds.compute,
        exposed=seconds.exposed,
        bubble=seconds.bubble,
        optimizer=seconds.optimizer,
        host=seconds.host,
    )


def _bubble_fraction(layout: Layout) -> float:
    """Return the pipeline's idle share of a step whose stages all take equally long."""
    return bubble_share(layout.schedule, layout.mesh.pp, layout.micros, layout.parallel.chunks)


def _mesh(mesh: Mesh) -> dict[str, int]:
    return dict(mesh.degrees)


def _groups(mesh: Mesh, gpus: int) -> dict[str, str]:
    """Return, for each axis, the size of its groups and how many of their ranks share a node, in words."""
    words: dict[str, str] = {}
    for axis in mesh.degrees:
        size, in_node = mesh.size(axis), mesh.in_node(axis, gpus)
        if size > 1:
            words[axis] = f"{size} ranks inside a node" if size <= in_node else f"{size} ranks, {in_node} in a node"
    return words


def _model_facts(context: CostContext) -> ModelFacts:
    return ModelFacts(
        parameters=context.parameters,
        trained_parameters=context.trained_parameters,
        active_parameters=context.active_parameters,
        flops_per_token=context.flops_per_token,
    )


def _memory(context: CostContext, layout: Layout, cost: LayoutCost) -> Memory:
    rows = []
    for index, at in enumerate(layout.partition.kind_of_stage):
        kind = cost.kinds[at]
        states, passes = kind.states, kind.passes
        kept = kept_bytes(layout, kind, index)
        held = {
            "weights": states.bytes.weights + states.version * extra_weight_copies(layout, index),
            "gradients": states.bytes.gradients,
            "optimizer": states.bytes.optimizer,
            "activations": kept.activations,
            "logits": kept.logits,
            "buffers": states.bytes.buffers + passes.held.workspace + kept.passing,
            "overhead": context.device_context,
        }
        total = stage_bytes(layout, kind, index)
        sizes = MemoryBytes(**held, temporary=total - sum(held.values()), total=total)
        parts = context.layers_of_stage(layout, index)
        rows.append(
            StageMemory(
                index=index,
                layers=parts[0],
                parts=parts,
                parameters=states.elements.parameters,
                in_flight=in_flight(layout, index),
                bytes=sizes,
                back=parts[1] if layout.is_folded else None,
            )
        )
    return Memory(
        peak=cost.peak,
        capacity=context.capacity,
        stage=cost.fullest,
        form=layout.form,
        stages=tuple(rows),
        unknown=() if context.table.has_costs else ("activations", "logits"),
        host=_host_memory(context, cost) if uses_host(context, layout) else None,
        most_ep_load=largest_ep_load(context, layout),
    )


def _host_memory(context: CostContext, cost: LayoutCost) -> HostMemory:
    cluster = context.run.cluster
    held = max([kind.states.bytes.host for kind in cost.kinds], key=lambda each: each.total)
    is_own = cluster.device.kind == "cpu"
    capacity = None if is_own or cluster.host.memory is None else int(cluster.host.memory)
    return HostMemory(node=cost.host, capacity=capacity, rank=RankHostBytes(**held._asdict()), is_own=is_own)


def largest_snapshot(context: CostContext, layout: Layout, cost: LayoutCost) -> int:
    """Return the bytes that the rank which saves most copies for a save in the background."""
    stages = zip(layout.partition.kinds, cost.kinds, strict=True)
    return max([snapshot_bytes(context, layout, cost.blocks, kind, each.states.elements) for kind, each in stages])


def forward_seconds(layout: Layout, cost: LayoutCost) -> float:
    """Return the seconds of the forward of one micro-batch through all stages; 0 where the device's rates aren't known."""
    stages = zip(layout.partition.stages_of_kind, cost.kinds, strict=True)
    return sum([many * (each.passes.forward + each.passes.message_forward) for many, each in stages])


def plan_throughput(context: CostContext, layout: Layout, seconds: StepSeconds) -> Throughput:
    """Return the throughput of a layout whose steps take so long."""
    run = context.run
    rate = run.train.batch * run.train.seq / seconds.step
    per_gpu = rate / context.world
    peak = run.cluster.device.peak[run.train.precision]
    model = per_gpu * context.flops_per_token
    hardware = per_gpu * (context.flops_per_token + context.recompute_flops_per_token(layout.parallel.recompute))
    return Throughput(
        tokens_per_second=rate,
        tokens_per_second_per_gpu=per_gpu,
        model_flops_per_second_per_gpu=model,
        hardware_flops_per_second_per_gpu=hardware,
        mfu=model / peak,
        hfu=hardware / peak,
    )
