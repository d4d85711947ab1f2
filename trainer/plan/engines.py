"""The engines that train, one row each: what each runs, what it costs, and its class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from ..models.families import FAMILIES, family_of
from ..spec.run import Parallel, Run
from .axes import AXES
from .changed_run import Change, overrides
from .cost_model import CostModel
from .deepspeed.cost_model import DeepSpeedCosts
from .schedules import SCHEDULES, Schedule


@dataclass(frozen=True, kw_only=True, eq=False)  # rows are compared by identity: they are keys of caches
class EngineRow:
    """An engine. `axes` are those that it splits over more than one rank; of `engine: auto` the first row with or without "pp" is taken."""

    name: str
    engine_class: str  # MODULE:CLASS, a subclass of trainer/engines/engine.py's Engine; "": it is planned, and can't train
    costs: CostModel
    axes: tuple[str, ...]
    zero: tuple[int, ...]
    native_schedules: tuple[str, ...]  # those that it has instructions of its own for
    executes_actions: bool  # it runs every plain schedule from its actions
    precisions: tuple[str, ...]
    offload: bool
    source: str

    @cached_property
    def pipeline(self) -> bool:
        """Whether it runs pipeline stages, and nothing else."""
        return "pp" in self.axes

    @property
    def schedules(self) -> tuple[str, ...]:
        """The pipeline schedules that it runs."""
        return _schedules(self, tuple(SCHEDULES.items()))

    def runs_schedule(self, name: str) -> bool:
        """Whether it runs a schedule of SCHEDULES."""
        return name in self.native_schedules or (self.executes_actions and SCHEDULES[name].is_plain)

    @property
    def families(self) -> tuple[str, ...]:
        """The model families that it trains."""
        return tuple(filter(self.trains_family, FAMILIES))

    def trains_family(self, name: str) -> bool:
        """Whether it trains a family of FAMILIES: one with a module, which a pipeline must be able to split."""
        family = FAMILIES[name]
        return bool(family.module) and (not self.pipeline or "pp" in family.axes)


@cache
def _schedules(row: EngineRow, schedules: tuple[tuple[str, Schedule], ...]) -> tuple[str, ...]:
    return tuple(name for name, _ in schedules if row.runs_schedule(name))


@dataclass(frozen=True, slots=True)
class EngineLimit:
    """A value of a key that an engine does not run; changes that may fix it, the nearest first, or a fix in words where there is none."""

    engine: str
    key: str
    value: object
    candidates: tuple[Change, ...] = ()
    fix: str = ""

    @property
    def says(self) -> str:
        """The limit as a sentence."""
        (override,) = overrides(((self.key, self.value),))
        if self.key == "engine":
            return f"{override} can be planned, but has no class that trains"
        return f"engine {self.engine} does not run {override}"


PAPERS = CostModel()  # of layouts that no engine runs
ENGINES = {
    row.name: row
    for row in (
        EngineRow(
            name="zero",
            engine_class="distrain.trainer.engines.deepspeed.zero:ZeroEngine",
            costs=DeepSpeedCosts(),
            axes=("dp", "cp", "ep", "tp"),
            zero=(0, 1, 2, 3),
            native_schedules=(),
            executes_actions=False,
            precisions=("fp32", "bf16", "fp16"),
            offload=True,
            source="deepspeed 0.19 ZeRO",
        ),
        EngineRow(
            name="pipe",
            engine_class="distrain.trainer.engines.deepspeed.pipe:PipeEngine",
            costs=DeepSpeedCosts(),
            axes=("pp", "dp", "cp", "ep", "tp"),
            zero=(0, 1),
            native_schedules=("1f1b", "dualpipev"),
            executes_actions=True,
            precisions=("fp32", "bf16", "fp16"),
            offload=False,
            source="deepspeed 0.19 PipelineEngine",
        ),
    )
}


def engine_for(run: Run, parallel: Parallel) -> tuple[EngineRow | None, tuple[EngineLimit, ...]]:
    """The engine that a run names, or with `engine: auto` the one for its layout, and its limits that the layout exceeds (none: it runs).

    With `auto` an engine that does not run the layout is left out.
    """
    for row in ENGINES.values():
        if run.engine == row.name or (run.engine == "auto" and row.pipeline == (parallel.pp > 1)):
            limits = tuple(_limits(row, run, parallel))
            return (row, limits) if run.engine != "auto" or not limits else (None, limits)
    return None, ()


def cost_model(engine: str | None) -> CostModel:
    """The cost model of an engine; without one, the papers'."""
    return ENGINES[engine].costs if engine else PAPERS


def _limits(row: EngineRow, run: Run, parallel: Parallel) -> Iterator[EngineLimit]:
    """Yield at most one limit a key; rules judge the rest of a layout. A sweep calls this for every layout: changes are made on demand."""
    if not row.engine_class:
        yield EngineLimit(row.name, "engine", row.name, ((("engine", "auto"),),), fix="name its class in ENGINES (trainer/plan/engines.py)")
    if row.pipeline != (parallel.pp > 1):
        other: Change = (("parallel.pp", 2), *_fill(parallel)) if row.pipeline else _without_pipeline(run, parallel)
        yield EngineLimit(row.name, "parallel.pp", parallel.pp, ((("engine", "auto"),), other))
    if parallel.zero not in row.zero:
        lower: Change = (("parallel.zero", max(row.zero)),)
        yield EngineLimit(row.name, "parallel.zero", parallel.zero, (lower, _without_pipeline(run, parallel)))
    elif parallel.zero == 3 and parallel.ep > 1:
        less: tuple[Change, ...] = ((("parallel.zero", 2),), (("parallel.ep", 1),))
        yield EngineLimit(row.name, "parallel.zero", f"3 with parallel.ep={parallel.ep}", less)
    if row.pipeline and not row.runs_schedule(parallel.schedule):
        yield _schedule_limit(row, run, parallel)
    if run.train.precision not in row.precisions:
        candidates = tuple((("train.precision", name),) for name in row.precisions)
        yield EngineLimit(row.name, "train.precision", run.train.precision, candidates)
    if not row.trains_family(run.model.family):
        yield EngineLimit(row.name, "model.family", run.model.family, fix=f"it runs {_or(row.families)}")
    for axis in AXES:
        if axis in ("pp", "dp") or (degree := getattr(parallel, axis)) == 1:
            continue
        if axis not in row.axes or axis in family_of(run.model).unsupported_axes:
            yield EngineLimit(row.name, f"parallel.{axis}", degree, (((f"parallel.{axis}", 1), *_fill(parallel)),))
    if parallel.shard != "all" and parallel.zero:
        yield EngineLimit(row.name, "parallel.shard", parallel.shard, ((("parallel.shard", "all"),), (("parallel.zero", 0),)))
    if parallel.reduce != "ring":
        yield EngineLimit(row.name, "parallel.reduce", parallel.reduce, ((("parallel.reduce", "ring"),),))
    if parallel.scatter and parallel.pp > 1 and parallel.tp > 1:
        plain: Change = (("parallel.scatter", False),)
        yield EngineLimit(row.name, "parallel.scatter", True, (plain, (*plain, ("parallel.sequence", True))))
    if parallel.offload.optimizer or parallel.offload.parameters:
        yield from _offload_limits(row, run, parallel)


def _fill(parallel: Parallel) -> Change:
    """The change of the data degree that fills the cluster."""
    return () if parallel.dp == "auto" else (("parallel.dp", "auto"),)


def _without_pipeline(run: Run, parallel: Parallel) -> Change:
    return (("parallel.pp", 1), *_fill(parallel), *((("engine", "auto"),) if run.engine != "auto" else ()))


def _schedule_limit(row: EngineRow, run: Run, parallel: Parallel) -> EngineLimit:
    plain: Change = (("parallel.chunks", 1),) if parallel.chunks > 1 else ()
    first, *others = ((("parallel.schedule", name), *plain) for name in row.schedules)
    return EngineLimit(row.name, "parallel.schedule", parallel.schedule, (first, (*_without_pipeline(run, parallel), *first), *others))


def _offload_limits(row: EngineRow, run: Run, parallel: Parallel) -> Iterator[EngineLimit]:
    """Pipelines offload nothing. Gradients that tensor-parallel ranks sum are not summed on the host: those of replicated weights where the
    sequence is split, those of key and value heads that ranks share."""
    offload, heads = parallel.offload, run.model.kv_heads or run.model.heads
    rows = (("parallel.offload.optimizer", offload.optimizer), ("parallel.offload.parameters", offload.parameters))
    keep: Change = tuple((key, False) for key, moved in rows if moved)
    if not row.offload:
        yield EngineLimit(row.name, "parallel.offload", True, (keep, _without_pipeline(run, parallel)))
    elif parallel.tp > 1 and parallel.sequence:
        yield EngineLimit(row.name, "parallel.offload", "true with parallel.sequence=true", ((("parallel.sequence", False),), keep))
    elif parallel.tp > heads:
        fewer: Change = (("parallel.tp", heads), *_fill(parallel))
        yield EngineLimit(row.name, "parallel.offload", f"true with more tensor-parallel ranks than model.kv_heads={heads}", (fewer, keep))


def _or(names: tuple[str, ...]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
