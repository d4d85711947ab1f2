"""The answer of a search: its rows with the figures of their plans, what slows each runner-up, and sizes of the cluster compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...spec.changed_run import Change, overrides, with_changes
from ...spec.keys.units import gib_text
from ...spec.problem import Problem
from ...spec.run import Parallel, Run
from ..axes import AXES, degree_keys
from ..costs.cost_context import CostContext
from ..engines import engine_for
from ..error_bars import Planned, memory_bar, step_bar
from ..fixes import problems_with_fixes
from ..layout.layout import Layout
from ..layout_cost import StepSeconds, layout_cost
from ..plan import make_plan, plan_throughput
from ..rules.rules import OF_LAYOUT, OF_RUN, broken_rules
from ..whole_run import plan_whole_run
from .kept_layouts import CostedLayout
from .run_seconds import ranked_seconds, whole_steps
from .search import candidate_layout, search_layouts
from .space import ZEROS, Candidate
from .stage_boundaries import best_stages, with_stages

LAYOUT_KEYS = ("cp_comm", "zero", "shard", "schedule", "chunks", "stages", "sequence", "recompute")
OVERTAKERS = 3  # times the rows of an answer: the meshes whose best layout may be among them with better stages
TERMS = ("compute", "exposed", "bubble", "optimizer", "host")


@dataclass(frozen=True, kw_only=True)
class FoundBoundaries:
    """Layers of each stage, or of each part of the model where a stage has several. Seconds of a step: with even stages, simulated in the
    same way, and those that no partition of this layout is below (the step's own: it is the best of all)."""

    stages: tuple[int, ...]
    even_step: float
    least_step: float


@dataclass(frozen=True, kw_only=True)
class FoundLayout:
    """One layout of an answer. `overrides` are the words that give it to the recipe. `slower_by` are the seconds of a step by which each
    term is above the best layout's; none where the batch grows, and layouts are ranked by `days`. Seconds are None where a rate is
    unknown, `cost` where the cluster has no price."""

    overrides: tuple[str, ...]
    mesh: dict[str, int]
    cp_comm: str | None  # None: one rank has all of a sequence
    microbatch: int
    zero: int
    shard: int | str
    schedule: str
    chunks: int
    sequence: bool
    recompute: str
    offload: tuple[str, ...]
    compiled: bool
    engine: str | None
    memory: int  # bytes of the fullest rank
    memory_low: int  # ends of its error bar
    memory_high: int | None  # None: the plan does not count all of it
    boundaries: FoundBoundaries | None  # None: even stages, or none
    step: float | None
    step_low: float | None
    step_high: float | None
    tokens_per_second: float | None
    mfu: float | None
    days: float | None
    cost: float | None  # of the whole run, in the currency of cluster.price
    slower_by: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a search found on one cluster: the best layout of each of the best meshes, and those that no other beats in time and memory."""

    name: str
    nodes: int
    gpus: int
    device: str
    capacity: int  # bytes of a GPU
    legal: int  # layouts
    costed: int
    discarded: int
    rows: tuple[FoundLayout, ...]
    front: tuple[FoundLayout, ...]
    problems: tuple[Problem, ...] = ()


def find_layouts(run: Run, fixed: frozenset[str] = frozenset()) -> Answer:
    """Search the layouts of a run, as its `search` section says; keys in `fixed` stay as the run has them."""
    if broken := broken_rules(run, run.parallel, run.train.microbatch, OF_RUN):
        return _answer(run, problems=problems_with_fixes(run, broken))
    settings = run.search
    if settings.boundaries and settings.by == "memory":
        says = "search.boundaries=true finds the fastest stages, and search.by=memory the smallest layouts"
        return _answer(run, problems=(Problem(rule="search", says=says, mend="leave one of them out"),))
    finds_stages = settings.boundaries and "parallel.stages" not in fixed
    rows = settings.rows * (OVERTAKERS if finds_stages else 1)
    found = search_layouts(run, fixed, rows=rows, by_memory=settings.by == "memory")
    best: list[tuple[CostedLayout, FoundBoundaries | None]] = [(each, None) for each in found.best]
    if finds_stages:
        best = sorted((_with_best_stages(found.context_of(each.candidate), each) for each in found.best), key=lambda row: row[0].seconds)
        best = best[: settings.rows]
    _, fastest = _layout_seconds(found.context_of(best[0][0].candidate), best[0][0]) if best else (None, None)
    return _answer(
        run,
        legal=found.legal,
        costed=found.costed,
        rows=tuple(_found_layout(run, found.context_of(each.candidate), each, fastest, boundaries) for each, boundaries in best),
        front=tuple(_found_layout(run, found.context_of(each.candidate), each, fastest) for each in found.front),
        problems=() if found.best else (_nothing_fits(run, fixed, found.legal),),
    )


def faster_layout(run: Run, fixed: frozenset[str], seconds: float) -> FoundLayout | None:
    """The fastest layout of a run, if the whole run takes it less than `seconds`. It is quick where there is none: slower ones are not
    costed."""
    known = CostedLayout(
        seconds / whole_steps(run.train), 0, Candidate(run.parallel, run.train.microbatch, None, run.train.compile)
    )  # as fast as asked, and smaller than any layout
    found = search_layouts(run, fixed, rows=1, known=known)
    (best,) = found.best
    return None if best is known else _found_layout(run, found.context_of(best.candidate), best, None)


def answer_changes(run: Run, candidate: Candidate) -> Change:
    """The keys of a run whose values a layout changes, with the new ones."""
    parallel = candidate.parallel
    changes: list[tuple[str, object]] = []
    for name in (*degree_keys(parallel), *LAYOUT_KEYS):
        old, new = getattr(run.parallel, name), getattr(parallel, name)
        if old != new and not (name == "dp" and old == "auto"):
            changes.append((f"parallel.{name}", new))
    for name in ("optimizer", "parameters"):
        if getattr(run.parallel.offload, name) != getattr(parallel.offload, name):
            changes.append((f"parallel.offload.{name}", getattr(parallel.offload, name)))
    if candidate.microbatch != run.train.microbatch:
        changes.append(("train.microbatch", candidate.microbatch))
    if candidate.compiled != run.train.compile:
        changes.append(("train.compile", candidate.compiled))
    return (*changes, *_engine_change(run, candidate, tuple(changes)))


def _engine_change(run: Run, candidate: Candidate, changes: Change) -> Iterator[tuple[str, object]]:
    """The engine, where the run would take another one."""
    changed = with_changes(run, changes)
    row, _ = engine_for(changed, changed.parallel)
    if (row.name if row else None) != candidate.engine and candidate.engine:
        yield "engine", candidate.engine


def _answer(run: Run, **fields: Any) -> Answer:
    cluster = run.cluster
    empty: dict[str, Any] = {"legal": 0, "costed": 0, "rows": (), "front": ()}
    given = empty | fields
    return Answer(
        name=run.name,
        nodes=cluster.nodes,
        gpus=cluster.gpus,
        device=cluster.device.name,
        capacity=0 if cluster.device.memory == "auto" else int(cluster.device.memory),
        discarded=given["legal"] - given["costed"],
        **given,
    )


def _nothing_fits(run: Run, fixed: frozenset[str], legal: int) -> Problem:
    if not legal:
        simplest, free = _simplest(run, fixed), "leave some of the given keys free"
        if problem := next((each for each in make_plan(simplest).problems if each.rule != "memory"), None):
            return problem
        if not run.search.runnable:
            return Problem(rule="search", says="there is no legal layout", mend=free)
        _, limits = engine_for(simplest, simplest.parallel)
        why = next((f": {each.says}" for each in limits if each.key in fixed - {"engine"}), "")
        says = f"there is no legal layout that an engine here runs{why}"
        return Problem(rule="search", says=says, mend=f"{free}, or set search.runnable=false")
    room = f"{1 - run.search.headroom:.0%}".replace("%", " %")
    memory = run.cluster.host.memory
    uses_hosts = run.cluster.device.kind == "cuda" and (run.checkpoint.in_background or _offloads(run, fixed))
    hosts = f" and of hosts of {gib_text(memory)} GiB" if memory and uses_hosts else ""
    devices = f"{run.cluster.nodes} x {run.cluster.gpus} {run.cluster.device.name}"
    says = f"none of {legal:,} layouts fits into {room} of the memory of {devices}{hosts}"
    return Problem(rule="memory", says=says, mend=f"search more nodes: search.nodes={2 * run.cluster.nodes}..{16 * run.cluster.nodes}")


def _offloads(run: Run, fixed: frozenset[str]) -> bool:
    """Whether a search offloads by the user's word."""
    return any(f"parallel.offload.{name}" in fixed for name in run.parallel.offload.names)


def _simplest(run: Run, fixed: frozenset[str]) -> Run:
    """The run with the default of each key that a search chooses: what the fixed ones break is broken there too."""
    default = Parallel()
    sections = {key.split(".")[1] for key in fixed if key.startswith("parallel.")}
    free = {name: getattr(default, name) for name in (*degree_keys(default), *LAYOUT_KEYS, "offload") if name not in sections}
    microbatch = run.train.microbatch if "train.microbatch" in fixed else 1
    parallel = replace(run.parallel, **free)
    layouts = [replace(parallel, zero=zero) for zero in ZEROS] if "zero" in free else [parallel]
    legal = (each for each in layouts if not broken_rules(run, each, microbatch, OF_LAYOUT))  # what is offloaded needs a ZeRO stage
    return replace(run, parallel=next(legal, layouts[0]), train=replace(run.train, microbatch=microbatch))


def _layout_seconds(context: CostContext, found: CostedLayout) -> tuple[Layout, StepSeconds | None]:
    layout = candidate_layout(context, found.candidate)
    return layout, layout_cost(context, layout).seconds


def _with_best_stages(context: CostContext, found: CostedLayout) -> tuple[CostedLayout, FoundBoundaries | None]:
    """A layout with the layers of each stage with which it is fastest, if they are not the even ones."""
    layout, capacity = candidate_layout(context, found.candidate), int(context.capacity * (1 - context.run.search.headroom))
    even = layout_cost(context, with_stages(layout, layout.partition.parts)) if layout.mesh.pp > 1 else None
    if even is None or even.seconds is None:
        return found, None
    seconds = layout_cost(context, layout).seconds
    assert seconds is not None  # as those of even parts
    best = best_stages(context, layout, even.blocks, capacity, below=min(seconds.step, even.seconds.step))
    if best.stages is None:
        return found, None
    changed = with_stages(layout, best.stages)
    peak, ranked = layout_cost(context, changed).peak, ranked_seconds(context, changed, best.seconds)
    candidate = found.candidate._replace(parallel=changed.parallel)
    boundaries = FoundBoundaries(stages=changed.partition.whole_parts, even_step=even.seconds.step, least_step=best.least)
    return CostedLayout(ranked, peak, candidate), boundaries


def _found_layout(
    given: Run, context: CostContext, found: CostedLayout, best: StepSeconds | None, boundaries: FoundBoundaries | None = None
) -> FoundLayout:
    run, (parallel, microbatch, engine, _) = context.run, found.candidate
    layout, seconds = _layout_seconds(context, found)
    speed = plan_throughput(context, layout, seconds) if seconds else None
    whole = plan_whole_run(context, layout, seconds)
    moved, grows = parallel.offload, bool(run.train.rampup.batches)
    planned = Planned(run, parallel, engine, found.peak)
    held, taken = memory_bar(planned), step_bar(planned, seconds.step, seconds.optimizer) if seconds else None
    return FoundLayout(
        overrides=overrides(answer_changes(given, found.candidate)),
        mesh={name: getattr(parallel, name) for name in AXES},
        cp_comm=parallel.cp_comm if parallel.cp > 1 else None,
        microbatch=microbatch,
        zero=parallel.zero,
        shard=parallel.shard,
        schedule=parallel.schedule,
        chunks=parallel.chunks,
        sequence=parallel.sequence,
        recompute=parallel.recompute,
        offload=moved.names,
        compiled=layout.fused,
        engine=engine,
        memory=found.peak,
        memory_low=round(held.low),
        memory_high=round(held.high) if context.table.has_costs else None,
        boundaries=boundaries,
        step=seconds.step if seconds else None,
        step_low=taken.low if taken else None,
        step_high=taken.high if taken else None,
        tokens_per_second=speed.tokens_per_second if speed else None,
        mfu=speed.mfu if speed else None,
        days=whole.days,
        cost=whole.cost,
        slower_by={term: getattr(seconds, term) - getattr(best, term) for term in TERMS} if seconds and best and not grows else {},
    )
