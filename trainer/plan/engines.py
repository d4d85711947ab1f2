"""What each engine can run, as data: one row an engine, read by the planner and by whatever launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..spec.problem import Problem
from ..spec.run import Parallel, Run
from .changed_run import Change, words


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine's limits; `built` are the largest degrees that this version of distrain runs on it, of axes where that is less."""

    name: str
    pipeline: bool
    zero: tuple[int, ...]
    schedules: tuple[str, ...]
    precisions: tuple[str, ...]
    families: tuple[str, ...]
    most: tuple[tuple[str, int], ...]  # (axis, the largest degree)
    offload: bool
    built: tuple[tuple[str, int], ...]
    source: str


@dataclass(frozen=True, slots=True)
class Limit:
    """What an engine does not run: a key's value. Changes that may mend it, the nearest first, or words where there is none."""

    engine: str
    key: str
    value: object
    tries: tuple[Change, ...] = ()
    mend: str = ""

    @property
    def says(self) -> str:
        (said,) = words(((self.key, self.value),))
        return f"engine {self.engine} does not run {said}"


ENGINES = (
    Engine(
        name="zero",
        pipeline=False,
        zero=(0, 1, 2, 3),
        schedules=(),
        precisions=("fp32", "bf16", "fp16"),
        families=("gpt", "llama", "moe", "hf"),
        most=(),
        offload=True,
        built=(),
        source="deepspeed 0.19 ZeRO",
    ),
    Engine(
        name="pipe",
        pipeline=True,
        zero=(0, 1),
        schedules=("1f1b", "gpipe", "dualpipev"),
        precisions=("fp32", "bf16", "fp16"),
        families=("gpt", "llama", "moe"),
        most=(),
        offload=False,
        built=(),
        source="deepspeed 0.19 PipelineEngine",
    ),
)


def engine_for(run: Run, parallel: Parallel) -> tuple[Engine | None, tuple[Limit, ...]]:
    """The engine that a run names, or that its layout wants, and what of the layout it can't do (empty: it runs)."""
    for engine in ENGINES:
        if run.engine == engine.name or (run.engine == "auto" and engine.pipeline == (parallel.pp > 1)):
            limits = tuple(_limits(engine, run, parallel))
            return (engine, limits) if run.engine != "auto" or not limits else (None, limits)
    return None, ()


def unbuilt(engine: Engine, parallel: Parallel) -> Iterator[Problem]:
    """What of a layout within an engine's limits this version can't run yet."""
    for axis, most in engine.built:
        if getattr(parallel, axis) > most:
            says = f"parallel.{axis}={getattr(parallel, axis)} is planned, but this version does not run it yet"
            yield Problem(rule="engine", says=says, mend=f"set parallel.{axis}={most} parallel.dp=auto")


def _limits(engine: Engine, run: Run, parallel: Parallel) -> Iterator[Limit]:
    """One a key; the rest of a layout is left to the rules. Asked of every layout of a sweep: changes are made where one is broken."""
    if engine.pipeline != (parallel.pp > 1):
        other: Change = (("parallel.pp", 2), *_filled(parallel)) if engine.pipeline else _alone(run, parallel)
        yield Limit(engine.name, "parallel.pp", parallel.pp, ((("engine", "auto"),), other))
    if parallel.zero not in engine.zero:
        yield Limit(engine.name, "parallel.zero", parallel.zero, ((("parallel.zero", max(engine.zero)),), _alone(run, parallel)))
    elif parallel.zero == 3 and parallel.ep > 1:
        less: tuple[Change, ...] = ((("parallel.zero", 2),), (("parallel.ep", 1),))
        yield Limit(engine.name, "parallel.zero", f"3 with parallel.ep={parallel.ep}", less)
    if engine.pipeline and parallel.schedule not in engine.schedules:
        yield _unscheduled(engine, run, parallel)
    if run.train.precision not in engine.precisions:
        tries = tuple((("train.precision", name),) for name in engine.precisions)
        yield Limit(engine.name, "train.precision", run.train.precision, tries)
    if run.model.family not in engine.families:
        yield Limit(engine.name, "model.family", run.model.family, mend=f"it runs {_any(engine.families)}")
    for axis, most in (*engine.most, *((("cp", 1),) if run.model.family == "moe" else ())):  # what is per sequence there wants it whole
        if (degree := getattr(parallel, axis)) > most:
            yield Limit(engine.name, f"parallel.{axis}", degree, (((f"parallel.{axis}", most), *_filled(parallel)),))
    if parallel.shard != "all" and parallel.zero:
        yield Limit(engine.name, "parallel.shard", parallel.shard, ((("parallel.shard", "all"),), (("parallel.zero", 0),)))
    if parallel.reduce != "ring":
        yield Limit(engine.name, "parallel.reduce", parallel.reduce, ((("parallel.reduce", "ring"),),))
    if parallel.scatter and parallel.pp > 1 and parallel.tp > 1:
        plain: Change = (("parallel.scatter", False),)
        yield Limit(engine.name, "parallel.scatter", True, (plain, (*plain, ("parallel.sequence", True))))
    if parallel.offload.optimizer or parallel.offload.parameters:
        yield from _offloaded(engine, run, parallel)


def _filled(parallel: Parallel) -> Change:
    """The data degree that fills the cluster."""
    return () if parallel.dp == "auto" else (("parallel.dp", "auto"),)


def _alone(run: Run, parallel: Parallel) -> Change:
    """No pipeline."""
    return (("parallel.pp", 1), *_filled(parallel), *((("engine", "auto"),) if run.engine != "auto" else ()))


def _unscheduled(engine: Engine, run: Run, parallel: Parallel) -> Limit:
    plain: Change = (("parallel.chunks", 1),) if parallel.chunks > 1 else ()
    first, *others = ((("parallel.schedule", name), *plain) for name in engine.schedules)
    return Limit(engine.name, "parallel.schedule", parallel.schedule, (first, (*_alone(run, parallel), *first), *others))


def _offloaded(engine: Engine, run: Run, parallel: Parallel) -> Iterator[Limit]:
    """A pipeline offloads nothing; gradients of which ranks of the tensor axis have a part each are not added up on the host yet."""
    offload, lanes = parallel.offload, run.model.kv_heads or run.model.heads
    rows = (("parallel.offload.optimizer", offload.optimizer), ("parallel.offload.parameters", offload.parameters))
    here: Change = tuple((key, False) for key, moved in rows if moved)
    if not engine.offload:
        yield Limit(engine.name, "parallel.offload", True, (here, _alone(run, parallel)))
    elif parallel.tp > 1 and parallel.sequence:
        yield Limit(engine.name, "parallel.offload", "true with parallel.sequence=true", ((("parallel.sequence", False),), here))
    elif parallel.tp > lanes:
        fewer: Change = (("parallel.tp", lanes), *_filled(parallel))
        yield Limit(engine.name, "parallel.offload", f"true with more tensor ranks than model.kv_heads={lanes}", (fewer, here))


def _any(names: tuple[object, ...]) -> str:
    words = [str(name) for name in names]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
