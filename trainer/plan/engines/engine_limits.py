"""Limits of an engine: the keys whose values it does not run, each with changes that may fix it."""

from __future__ import annotations

from collections.abc import Iterator

from ...models.families import has_experts, is_made_by_transformers
from ...spec.changed_run import Change
from ...spec.derived.compiled_layers import has_compiled_layers
from ...spec.run import Parallel, Run
from ..axes import AXES
from ..costs.muon import MUON
from ..costs.precision import has_moments
from ..layout.schedule_of_run import legal_schedule
from ..layout.schedules import Schedule
from .engine_limit import EngineLimit
from .engine_row import EngineRow

NOT_LATE = ("fp16", "fp8")  # precisions in which late weights, late sums and compressed gradients are not run


def exceeded_limits(row: EngineRow, run: Run, parallel: Parallel) -> Iterator[EngineLimit]:
    """Yield at most one limit a key; rules judge the rest of a layout. A sweep calls this for every layout: changes are made on demand."""
    if not row.engine_class:
        yield EngineLimit(row.name, "engine", row.name, ((("engine", "auto"),),), fix="name its class in ENGINES (trainer/plan/engines)")
    schedule = legal_schedule(parallel)
    delay = schedule.delay if schedule else None
    if not (row.pipeline if parallel.pp > 1 else row.whole_models):
        other: Change = (("parallel.pp", 2), *_fill(parallel)) if row.pipeline else _without_pipeline(run, parallel)
        yield EngineLimit(row.name, "parallel.pp", parallel.pp, ((("engine", "auto"),), other))
    if parallel.zero not in row.zero:
        lower: Change = (("parallel.zero", max(row.zero)),)
        yield EngineLimit(row.name, "parallel.zero", parallel.zero, (lower, _without_pipeline(run, parallel)))
    elif parallel.zero > 1 and delay:
        value = f"{parallel.zero} with parallel.schedule={parallel.schedule}"
        yield EngineLimit(row.name, "parallel.zero", value, ((("parallel.zero", 1),), _change_to_flush(parallel)))
    elif parallel.zero == 3:
        yield from _stage3_limits(row, run, parallel, schedule)
    if schedule and row.pipeline and not row.runs_schedule(parallel.schedule, schedule):
        yield _schedule_limit(row, run, parallel)
    if run.train.precision not in row.precisions:
        yield EngineLimit(row.name, "train.precision", run.train.precision, tuple((("train.precision", name),) for name in row.precisions))
    elif delay:
        yield from _delay_limits(row, run, parallel, each_micro_batch=delay.each_micro_batch)
    elif run.train.precision == "fp8":
        yield from _fp8_limits(row, run)
    if schedule and schedule.splits_backward and has_compiled_layers(run.train, parallel):
        eager: Change = (("train.compile", False),)
        whole = _change_to_flush(parallel)
        yield EngineLimit(row.name, "train.compile", f"true with parallel.schedule={parallel.schedule}", (eager, whole))
    if not row.trains_family(run.model.family):
        yield EngineLimit(row.name, "model.family", run.model.family, fix=f"it runs {_or(row.families)}")
    for axis in AXES:
        if axis in ("pp", "dp") or (degree := getattr(parallel, axis)) == 1:
            continue
        if axis not in row.axes:
            yield EngineLimit(row.name, f"parallel.{axis}", degree, (((f"parallel.{axis}", 1), *_fill(parallel)),))
    if parallel.shard != "all" and parallel.zero and not row.hybrid_shards:
        changes: tuple[Change, ...] = (*_any_engine(run), (("parallel.shard", "all"),), (("parallel.zero", 0),))
        yield EngineLimit(row.name, "parallel.shard", parallel.shard, changes)
    if parallel.sync.every > 1:
        yield from _sync_limits(row, run, parallel, delayed=delay is not None)
    if parallel.staleness:
        yield from _staleness_limits(row, run, parallel, delayed=delay is not None)
    if parallel.reduce in ("halving", "tree"):
        yield EngineLimit(row.name, "parallel.reduce", parallel.reduce, ((("parallel.reduce", "auto"),), (("parallel.reduce", "ring"),)))
    elif parallel.reduce not in ("auto", "ring"):
        yield from _route_limits(row, run, parallel, delayed=delay is not None)
    if parallel.compress.name != "none":
        yield from _compression_limits(row, run, parallel, delayed=delay is not None)
    if has_experts(run.model) and run.model.router.steps_bias:
        yield from _bias_rate_limits(row, run, parallel, delayed=delay is not None)
    if run.train.skip_spikes and (delay or not row.skips_spikes):
        key, value, none = "train.skip_spikes", f"{run.train.skip_spikes:g}", (("train.skip_spikes", 0),)
        if row.skips_spikes:  # stages of a pipeline without a flush step alone
            conflicts: tuple[Conflict, ...] = ((True, "parallel.schedule", parallel.schedule, _change_to_flush(parallel)),)
            yield from _first_conflict(row, key, value, conflicts, none)
        else:
            yield EngineLimit(row.name, key, value, (*_any_engine(run), (("engine", "native"),), none))
    if run.optim.mup and not row.rates_by_width:
        yield EngineLimit(row.name, "optim.mup", run.optim.mup, (*_any_engine(run), (("engine", "native"),), (("optim.mup", None),)))
    if run.optim.name == MUON:
        yield from _muon_limits(row, run, parallel, delayed=delay is not None)
    if run.optim.moments != "fp32" and has_moments(run.optim) and not row.rounds_moments:
        without: Change = (("optim.moments", "fp32"),)
        yield EngineLimit(row.name, "optim.moments", run.optim.moments, (*_any_engine(run), (("engine", "native"),), without))
    if run.optim.ema:
        yield from _average_limits(row, run, parallel, delayed=delay is not None)
    if run.data.has_preferences:
        yield from _preference_limits(row, parallel, delayed=delay is not None)
    if parallel.scatter and parallel.pp > 1 and parallel.tp > 1:
        plain: Change = (("parallel.scatter", False),)
        yield EngineLimit(row.name, "parallel.scatter", True, (plain, (*plain, ("parallel.sequence", True))))
    if parallel.offload.names:
        yield from _offload_limits(row, run, parallel, delayed=delay is not None)


def _fp8_limits(row: EngineRow, run: Run) -> Iterator[EngineLimit]:
    """Our own layers multiply in 8-bit floats, and those of LoRA's factors are too thin."""
    conflicts: tuple[Conflict, ...] = (
        (is_made_by_transformers(run.model), "model.family", run.model.family, ()),
        (run.model.lora.rank > 0, "model.lora.rank", run.model.lora.rank, ()),
    )
    yield from _first_conflict(row, "train.precision", "fp8", conflicts, (("train.precision", "bf16"),))


def _stage3_limits(row: EngineRow, run: Run, parallel: Parallel, schedule: Schedule | None) -> Iterator[EngineLimit]:
    """DeepSpeed's ZeRO 3 shards no experts that ranks share out. Ours keeps weights gathered where it defers their gradients, and shards
    no weight that two parts of one stage use."""
    less: Change = (("parallel.zero", 2),)
    if parallel.ep > 1 and not row.shards_experts:
        yield EngineLimit(row.name, "parallel.zero", f"3 with parallel.ep={parallel.ep}", (*_any_engine(run), less, (("parallel.ep", 1),)))
    elif schedule:
        whole = _change_to_flush(parallel)
        if schedule.splits_backward and parallel.gather == "micro":
            says = f"3 with parallel.schedule={parallel.schedule} and parallel.gather=micro"
            yield EngineLimit(row.name, "parallel.zero", says, ((("parallel.gather", "step"),), less, whole))
        elif schedule.folded and run.model.tied:
            says = f"3 with parallel.schedule={parallel.schedule} and model.tied=true"
            yield EngineLimit(row.name, "parallel.zero", says, (less, whole))
        elif schedule.folded and run.model.mtp.layers:
            says = f"3 with parallel.schedule={parallel.schedule} and model.mtp.layers={run.model.mtp.layers}"
            yield EngineLimit(row.name, "parallel.zero", says, (less, whole))
    if parallel.gather == "step" and not row.gathers_once:
        yield EngineLimit(row.name, "parallel.gather", "step", (*_any_engine(run), (("parallel.gather", "micro"),)))
    if not row.shards_hf and is_made_by_transformers(run.model):
        yield EngineLimit(row.name, "parallel.zero", "3 with model.family=hf", (less, (("engine", "zero"),)))


Conflict = tuple[bool, str, object, Change]  # whether it is there, the other key and its value, the change of it


def _first_conflict(row: EngineRow, key: str, value: object, conflicts: tuple[Conflict, ...], without: Change) -> Iterator[EngineLimit]:
    """Yield the first of some values of other keys with which a value of this one does not run; `without` gives this one up."""
    for is_there, other, its, change in conflicts:
        if is_there:
            yield EngineLimit(row.name, key, f"{value} with {other}={its}", (change, without) if change else (without,))
            return


def _sync_limits(row: EngineRow, run: Run, parallel: Parallel, *, delayed: bool) -> Iterator[EngineLimit]:
    """Replicas that step alone shard and count labels for themselves."""
    key, value, together = "parallel.sync.every", parallel.sync.every, (("parallel.sync.every", 1),)
    if not row.steps_alone:
        yield EngineLimit(row.name, key, value, (*_any_engine(run), together))
        return
    conflicts: tuple[Conflict, ...] = (
        (delayed, "parallel.schedule", parallel.schedule, _change_to_flush(parallel)),
        (bool(parallel.zero) and parallel.shard != "all", "parallel.shard", parallel.shard, (("parallel.shard", "all"),)),
        (run.data.has_prompts, "data.name", run.data.name, ()),
        (run.data.documents, "data.documents", "true", (("data.documents", False),)),
        (is_made_by_transformers(run.model), "model.family", run.model.family, ()),
        (run.optim.moments == "int8", "optim.moments", "int8", (("optim.moments", "bf16"),)),  # which are averaged when they are saved
    )
    yield from _first_conflict(row, key, value, conflicts, together)


def _average_limits(row: EngineRow, run: Run, parallel: Parallel, *, delayed: bool) -> Iterator[EngineLimit]:
    """Weights of which a rank steps several versions, or its own, are no one's average."""
    key, value, none = "optim.ema", run.optim.ema, (("optim.ema", 0.0),)
    if not row.averages_weights:
        yield EngineLimit(row.name, key, value, (*_any_engine(run), (("engine", "native"),), none))
        return
    conflicts: tuple[Conflict, ...] = (
        (delayed, "parallel.schedule", parallel.schedule, _change_to_flush(parallel)),
        (parallel.sync.every > 1, "parallel.sync.every", parallel.sync.every, (("parallel.sync.every", 1),)),
    )
    yield from _first_conflict(row, key, value, conflicts, none)


def _staleness_limits(row: EngineRow, run: Run, parallel: Parallel, *, delayed: bool) -> Iterator[EngineLimit]:
    """A sum that is used late is one message of a step's gradients, after which none may have to follow: no backward waits for memory that
    it frees, and no loss scale changes meanwhile."""
    key, value, fresh = "parallel.staleness", parallel.staleness, (("parallel.staleness", 0),)
    if not row.stale_class:
        yield EngineLimit(row.name, key, value, (*_any_engine(run), fresh))
        return
    conflicts: tuple[Conflict, ...] = (
        (delayed, "parallel.schedule", parallel.schedule, _change_to_flush(parallel)),
        (parallel.zero > 1, "parallel.zero", parallel.zero, (("parallel.zero", 1),)),
        (bool(parallel.zero) and parallel.shard != "all", "parallel.shard", parallel.shard, (("parallel.shard", "all"),)),
        (parallel.sync.every > 1, "parallel.sync.every", parallel.sync.every, (("parallel.sync.every", 1),)),
        (run.train.precision in NOT_LATE, "train.precision", run.train.precision, (("train.precision", "bf16"),)),
    )
    yield from _first_conflict(row, key, value, conflicts, fresh)


def _route_limits(row: EngineRow, run: Run, parallel: Parallel, *, delayed: bool) -> Iterator[EngineLimit]:
    """Sums in two levels and parameter servers stand for the one sum of whole gradients at each step. Those in two levels are several
    messages, so they are not used late."""
    key, name, plain = "parallel.reduce", parallel.reduce, (("parallel.reduce", "ring"),)
    if not row.routes_sums:
        others = tuple((*change, *_change_to_zero_0(parallel)) for change in _any_engine(run))
        yield EngineLimit(row.name, key, name, (*others, plain))
        return
    late = parallel.staleness if name == "hierarchical" else 0
    conflicts: tuple[Conflict, ...] = (
        (parallel.zero > 0, "parallel.zero", parallel.zero, _change_to_zero_0(parallel)),
        (delayed, "parallel.schedule", parallel.schedule, _change_to_flush(parallel)),
        (parallel.ep > 1, "parallel.ep", parallel.ep, (("parallel.ep", 1),)),
        (parallel.sync.every > 1, "parallel.sync.every", parallel.sync.every, (("parallel.sync.every", 1),)),
        (late > 0, "parallel.staleness", late, (("parallel.staleness", 0),)),
    )
    yield from _first_conflict(row, key, name, conflicts, plain)


def _delay_limits(row: EngineRow, run: Run, parallel: Parallel, *, each_micro_batch: bool) -> Iterator[EngineLimit]:
    """A pipeline without a flush swaps the weights under a layer that runs, updates the two ends of a model at different times, keeps no
    loss scale for each micro-batch, and counts labels a step."""
    schedule, flushed = f" with parallel.schedule={parallel.schedule}", _change_to_flush(parallel)
    if run.model.tied:
        yield EngineLimit(row.name, "model.tied", f"true{schedule}", ((("model.tied", False),), flushed))
    if modules := run.model.mtp.layers:
        yield EngineLimit(row.name, "model.mtp.layers", f"{modules}{schedule}", ((("model.mtp.layers", 0),), flushed))
    if run.train.precision in NOT_LATE:
        yield EngineLimit(row.name, "train.precision", f"{run.train.precision}{schedule}", ((("train.precision", "bf16"),), flushed))
    if has_compiled_layers(run.train, parallel):
        yield EngineLimit(row.name, "train.compile", f"true{schedule}", ((("train.compile", False),), flushed))
    if each_micro_batch and run.data.documents:
        yield EngineLimit(row.name, "data.documents", f"true{schedule}", ((("parallel.schedule", "pipedream_2bw"),), flushed))


def _compression_limits(row: EngineRow, run: Run, parallel: Parallel, *, delayed: bool) -> Iterator[EngineLimit]:
    """Factors stand for the whole sum of a matrix's gradients, which a rank steps with once: no rank keeps a shard of it, no update comes
    late, and no loss scale changes the error's units between two steps."""
    key, name, whole = "parallel.compress.name", parallel.compress.name, (("parallel.compress.name", "none"),)
    if not row.compresses:
        yield EngineLimit(row.name, key, name, (*_any_engine(run), (("engine", "native"), *_change_to_zero_0(parallel)), whole))
        return
    routed = parallel.reduce in ("hierarchical", "server")
    conflicts: tuple[Conflict, ...] = (
        (parallel.zero > 0, "parallel.zero", parallel.zero, _change_to_zero_0(parallel)),
        (parallel.sync.every > 1, "parallel.sync.every", parallel.sync.every, (("parallel.sync.every", 1),)),
        (delayed, "parallel.schedule", parallel.schedule, _change_to_flush(parallel)),
        (run.train.precision in NOT_LATE, "train.precision", run.train.precision, (("train.precision", "bf16"),)),
        (parallel.staleness > 0, "parallel.staleness", parallel.staleness, (("parallel.staleness", 0),)),
        (routed, "parallel.reduce", parallel.reduce, (("parallel.reduce", "ring"),)),
    )
    yield from _first_conflict(row, key, name, conflicts, whole)


def _muon_limits(row: EngineRow, run: Run, parallel: Parallel, *, delayed: bool) -> Iterator[EngineLimit]:
    """Muon is ours, of weights whose names say what they are, and LoRA's factors are thin. With weights or gradients that come late, that
    workers have alone, or that travel otherwise, it is not proved."""
    key, adamw = "optim.name", (("optim.name", "adamw"),)
    if not row.steps_matrices:
        yield EngineLimit(row.name, key, MUON, (*_any_engine(run), (("engine", "native"),), adamw))
        return
    reduced, compressed = parallel.reduce in ("hierarchical", "server"), parallel.compress.name
    conflicts: tuple[Conflict, ...] = (
        (is_made_by_transformers(run.model), "model.family", run.model.family, ()),
        (run.model.lora.rank > 0, "model.lora.rank", run.model.lora.rank, ()),
        (run.model.mtp.layers > 0, "model.mtp.layers", run.model.mtp.layers, (("model.mtp.layers", 0),)),
        (delayed, "parallel.schedule", parallel.schedule, _change_to_flush(parallel)),
        (parallel.staleness > 0, "parallel.staleness", parallel.staleness, (("parallel.staleness", 0),)),
        (parallel.sync.every > 1, "parallel.sync.every", parallel.sync.every, (("parallel.sync.every", 1),)),
        (compressed != "none", "parallel.compress.name", compressed, (("parallel.compress.name", "none"),)),
        (reduced, "parallel.reduce", parallel.reduce, (("parallel.reduce", "ring"),)),
    )
    yield from _first_conflict(row, key, MUON, conflicts, adamw)


def _preference_limits(row: EngineRow, parallel: Parallel, *, delayed: bool) -> Iterator[EngineLimit]:
    """The curves that late and compressed steps are proved by are of losses of tokens."""
    compressed = parallel.compress.name
    for is_there, key, value, change in (
        (delayed, "parallel.schedule", parallel.schedule, _change_to_flush(parallel)),
        (parallel.staleness > 0, "parallel.staleness", parallel.staleness, (("parallel.staleness", 0),)),
        (compressed != "none", "parallel.compress.name", compressed, (("parallel.compress.name", "none"),)),
    ):
        if is_there:
            yield EngineLimit(row.name, "data.name", f"preferences with {key}={value}", (change,))
            return


def _bias_rate_limits(row: EngineRow, run: Run, parallel: Parallel, *, delayed: bool) -> Iterator[EngineLimit]:
    """The biases of routers are stepped with the tokens of the whole step just done."""
    conflicts: tuple[Conflict, ...] = (
        (delayed, "parallel.schedule", parallel.schedule, _change_to_flush(parallel)),
        (parallel.staleness > 0, "parallel.staleness", parallel.staleness, (("parallel.staleness", 0),)),
        (parallel.sync.every > 1, "parallel.sync.every", parallel.sync.every, (("parallel.sync.every", 1),)),
    )
    rate = run.model.router.bias_rate
    yield from _first_conflict(row, "model.router.bias_rate", rate, conflicts, (("model.router.bias_rate", 0),))


def _change_to_zero_0(parallel: Parallel) -> Change:
    """The change after which no rank keeps a shard."""
    return (("parallel.zero", 0),) if parallel.zero else ()


def _change_to_flush(parallel: Parallel) -> Change:
    """The change to the plain schedule that flushes."""
    return (("parallel.schedule", "1f1b"), *((("parallel.chunks", 1),) if parallel.chunks > 1 else ()))


def _any_engine(run: Run) -> tuple[Change, ...]:
    """The change that lets another engine run the layout; none where the user names no engine."""
    return ((("engine", "auto"),),) if run.engine != "auto" else ()


def _fill(parallel: Parallel) -> Change:
    """The change of the data degree that fills the cluster."""
    return () if parallel.dp == "auto" else (("parallel.dp", "auto"),)


def _without_pipeline(run: Run, parallel: Parallel) -> Change:
    return (("parallel.pp", 1), *_fill(parallel), *(change for changes in _any_engine(run) for change in changes))


def _schedule_limit(row: EngineRow, run: Run, parallel: Parallel) -> EngineLimit:
    plain: Change = (("parallel.chunks", 1),) if parallel.chunks > 1 else ()
    first, *others = ((("parallel.schedule", name), *plain) for name in row.schedules)
    return EngineLimit(row.name, "parallel.schedule", parallel.schedule, (first, (*_without_pipeline(run, parallel), *first), *others))


def _offload_limits(row: EngineRow, run: Run, parallel: Parallel, *, delayed: bool) -> Iterator[EngineLimit]:
    """Gradients that tensor-parallel ranks sum are not summed on the host: those of replicated weights where the sequence is split, and of
    key and value heads that ranks share. Our host steps AdamW of shards that are apart from forward's weights, once a step."""
    moved, heads = parallel.offload.names, run.model.kv_heads or run.model.heads
    keep: Change = tuple((f"parallel.offload.{name}", False) for name in moved)
    key = next((f"parallel.offload.{name}" for name in moved if name not in row.offload), keep[0][0])
    if not set(moved) <= set(row.offload):
        only: tuple[Change, ...] = ((*keep[1:],),) if row.offload and len(keep) > 1 else ()
        others = (*_any_engine(run), *((_without_pipeline(run, parallel),) if parallel.pp > 1 else ()))
        yield EngineLimit(row.name, key, True, (*only, keep, *others))
    elif not row.offloads_gradients:
        conflicts: tuple[Conflict, ...] = (
            (parallel.zero == 3, "parallel.zero", 3, (("parallel.zero", 2),)),
            (run.optim.name != "adamw", "optim.name", run.optim.name, (("optim.name", "adamw"),)),
            (delayed, "parallel.schedule", parallel.schedule, _change_to_flush(parallel)),
            (parallel.staleness > 0, "parallel.staleness", parallel.staleness, (("parallel.staleness", 0),)),
            (parallel.sync.every > 1, "parallel.sync.every", parallel.sync.every, (("parallel.sync.every", 1),)),
            (run.optim.moments == "int8", "optim.moments", "int8", (("optim.moments", "bf16"),)),
        )
        yield from _first_conflict(row, key, "true", conflicts, keep)
    elif parallel.tp > 1 and parallel.sequence:
        yield EngineLimit(row.name, key, "true with parallel.sequence=true", ((("parallel.sequence", False),), keep))
    elif parallel.tp > heads:
        fewer: Change = (("parallel.tp", heads), *_fill(parallel))
        yield EngineLimit(row.name, key, f"true with more tensor-parallel ranks than model.kv_heads={heads}", (fewer, keep))


def _or(names: tuple[str, ...]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
