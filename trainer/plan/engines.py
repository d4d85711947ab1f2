"""What each engine can run, as data: one row an engine, read by the planner and by whatever launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..spec.problem import Problem
from ..spec.run import Parallel, Run


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine's limits; `built` are the largest degrees that this version of distrain runs on it, None where it runs none."""

    name: str
    pipeline: bool
    zero: tuple[int, ...]
    schedules: tuple[str, ...]
    precisions: tuple[str, ...]
    families: tuple[str, ...]
    most: tuple[tuple[str, int], ...]  # (axis, the largest degree)
    offload: bool
    built: tuple[tuple[str, int], ...] | None
    source: str


ENGINES = (
    Engine(
        name="zero",
        pipeline=False,
        zero=(0, 1, 2, 3),
        schedules=(),
        precisions=("fp32", "bf16", "fp16"),
        families=("gpt", "llama", "hf"),
        most=(("cp", 1), ("ep", 1)),
        offload=True,
        built=(("tp", 1),),
        source="deepspeed 0.19 ZeRO",
    ),
    Engine(
        name="pipe",
        pipeline=True,
        zero=(0, 1),
        schedules=("1f1b", "gpipe"),
        precisions=("fp32", "bf16", "fp16"),
        families=("gpt", "llama"),
        most=(("cp", 1), ("ep", 1)),
        offload=False,
        built=None,
        source="deepspeed 0.19 PipelineEngine",
    ),
)


def engine_for(run: Run, parallel: Parallel) -> tuple[Engine | None, tuple[Problem, ...]]:
    """The engine that a run names, or that its layout wants, and what of the layout it can't do (empty: it runs)."""
    for engine in ENGINES:
        if run.engine == engine.name or (run.engine == "auto" and engine.pipeline == (parallel.pp > 1)):
            limits = tuple(_limits(engine, run, parallel))
            return (engine, limits) if run.engine != "auto" or not limits else (None, limits)
    return None, ()


def unbuilt(engine: Engine, parallel: Parallel) -> Iterator[Problem]:
    """What of a layout within an engine's limits this version can't run yet."""
    if engine.built is None:
        says = f"engine {engine.name} is planned, but this version does not run it yet"
        yield Problem(rule="engine", says=says, mend="set parallel.pp=1 parallel.dp=auto" + " parallel.tp=1" * (parallel.tp > 1))
        return
    for axis, most in engine.built:
        if getattr(parallel, axis) > most:
            says = f"parallel.{axis}={getattr(parallel, axis)} is planned, but this version does not run it yet"
            yield Problem(rule="engine", says=says, mend=f"set parallel.{axis}={most} parallel.dp=auto")


def _limits(engine: Engine, run: Run, parallel: Parallel) -> Iterator[Problem]:
    train = run.train

    def cannot(key: str, value: object, mend: str) -> Problem:
        return Problem(rule="engine", says=f"engine {engine.name} does not run {key}={value}", mend=mend)

    if engine.pipeline != (parallel.pp > 1):
        yield cannot("parallel.pp", parallel.pp, "set engine=auto")
    if parallel.zero not in engine.zero:
        yield cannot("parallel.zero", parallel.zero, f"set parallel.zero to {_any(engine.zero)}")
    if engine.pipeline and parallel.schedule not in engine.schedules:
        yield cannot("parallel.schedule", parallel.schedule, f"set parallel.schedule to {_any(engine.schedules)}")
    if train.precision not in engine.precisions:
        yield cannot("train.precision", train.precision, f"set train.precision to {_any(engine.precisions)}")
    if run.model.family not in engine.families:
        yield cannot("model.family", run.model.family, f"it runs {_any(engine.families)}")
    for axis, most in engine.most:
        if getattr(parallel, axis) > most:
            yield cannot(f"parallel.{axis}", getattr(parallel, axis), f"set parallel.{axis}={most}")
    if parallel.shard != "all" and parallel.zero:
        yield cannot("parallel.shard", parallel.shard, "set parallel.shard=all")
    if parallel.reduce != "ring":
        yield cannot("parallel.reduce", parallel.reduce, "set parallel.reduce=ring")
    if parallel.scatter and parallel.pp > 1 and parallel.tp > 1:
        yield cannot("parallel.scatter", "true", "set parallel.scatter=false")
    if not engine.offload and (parallel.offload.optimizer or parallel.offload.parameters):
        yield cannot("parallel.offload", "true", "set parallel.pp=1 or offload nothing")


def _any(names: tuple[object, ...]) -> str:
    words = [str(name) for name in names]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
