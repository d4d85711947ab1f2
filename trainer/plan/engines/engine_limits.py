"""Limits of an engine: the keys whose values it does not run, each with changes that may fix it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...models.families import has_experts, is_made_by_transformers
from ...spec.changed_run import Change
from ...spec.derived.compiled_layers import has_compiled_layers
from ...spec.run import Parallel, Run
from ..axes import AXES
from .asked_layout import NOT_LATE, AskedLayout
from .engine_limit import EngineLimit
from .engine_row import EngineRow
from .gradient_sum_limits import compression_limits, late_sum_limits, route_limits, sync_limits
from .optimizer_limits import average_limits, moments_limit, muon_limits, mup_limit, offload_limits, spike_limits


def exceeded_limits(row: EngineRow, run: Run, parallel: Parallel) -> Iterator[EngineLimit]:
    """Yield at most one limit a key; rules judge the rest of a layout. Limits are found one by one, as the caller asks for the next."""
    asked = AskedLayout.of(row, run, parallel)
    for limits in LIMITS:
        yield from limits(asked)


def _class_limit(asked: AskedLayout) -> Iterator[EngineLimit]:
    if not asked.row.engine_class:
        yield asked.limit("engine", asked.row.name, (("engine", "auto"),), fix="name its class in ENGINES (trainer/plan/engines)")


def _pipeline_limit(asked: AskedLayout) -> Iterator[EngineLimit]:
    pp = asked.parallel.pp
    if not (asked.row.pipeline if pp > 1 else asked.row.whole_models):
        other: Change = (("parallel.pp", 2), *asked.fill) if asked.row.pipeline else asked.no_stages
        yield asked.limit("parallel.pp", pp, (("engine", "auto"),), other)


def _zero_limits(asked: AskedLayout) -> Iterator[EngineLimit]:
    zero = asked.parallel.zero
    if zero not in asked.row.zero:
        yield asked.limit("parallel.zero", zero, (("parallel.zero", max(asked.row.zero)),), asked.no_stages)
    elif zero > 1 and asked.delay:
        yield asked.limit("parallel.zero", f"{zero} with parallel.schedule={asked.parallel.schedule}", (("parallel.zero", 1),), asked.flush)
    elif zero == 3:
        yield from _zero_3_limits(asked)


def _zero_3_limits(asked: AskedLayout) -> Iterator[EngineLimit]:
    """DeepSpeed's ZeRO 3 shards no experts that ranks share out. Ours keeps weights gathered where it defers their gradients, and shards
    no weight that two parts of one stage use."""
    row, model, parallel, schedule = asked.row, asked.run.model, asked.parallel, asked.schedule
    less: Change = (("parallel.zero", 2),)
    if parallel.ep > 1 and not row.shards_experts:
        yield asked.limit("parallel.zero", f"3 with parallel.ep={parallel.ep}", asked.any_engine, less, (("parallel.ep", 1),))
    elif schedule:
        value = f"3 with parallel.schedule={parallel.schedule} and "
        if schedule.splits_backward and parallel.gather == "micro":
            yield asked.limit("parallel.zero", f"{value}parallel.gather=micro", (("parallel.gather", "step"),), less, asked.flush)
        elif schedule.folded and model.tied:
            yield asked.limit("parallel.zero", f"{value}model.tied=true", less, asked.flush)
        elif schedule.folded and model.mtp.layers:
            yield asked.limit("parallel.zero", f"{value}model.mtp.layers={model.mtp.layers}", less, asked.flush)
    if parallel.gather == "step" and not row.gathers_once:
        yield asked.limit("parallel.gather", "step", asked.any_engine, (("parallel.gather", "micro"),))
    if not row.shards_hf and is_made_by_transformers(model):
        yield asked.limit("parallel.zero", "3 with model.family=hf", less, (("engine", "zero"),))


def _schedule_limit(asked: AskedLayout) -> Iterator[EngineLimit]:
    row, parallel, schedule = asked.row, asked.parallel, asked.schedule
    if schedule and row.pipeline and not row.runs_schedule(parallel.schedule, schedule):
        plain: Change = (("parallel.chunks", 1),) if parallel.chunks > 1 else ()
        first, *others = ((("parallel.schedule", name), *plain) for name in row.schedules)
        yield asked.limit("parallel.schedule", parallel.schedule, first, (*asked.no_stages, *first), *others)


def _precision_limits(asked: AskedLayout) -> Iterator[EngineLimit]:
    precision = asked.run.train.precision
    if precision not in asked.row.precisions:
        yield asked.limit("train.precision", precision, *((("train.precision", name),) for name in asked.row.precisions))
    elif asked.delay:
        yield from _delay_limits(asked, each_micro_batch=asked.delay.each_micro_batch)
    elif precision == "fp8":  # our own layers multiply in 8-bit floats, and LoRA's factors are too thin
        yield from asked.first_conflict("train.precision", "fp8", (asked.made_by_transformers, asked.lora), (("train.precision", "bf16"),))


def _delay_limits(asked: AskedLayout, *, each_micro_batch: bool) -> Iterator[EngineLimit]:
    """A pipeline without a flush swaps the weights under a layer that runs, updates the two ends of a model at different times, keeps no
    loss scale for each micro-batch, and counts labels a step."""
    run, flush = asked.run, asked.flush
    late = f" with parallel.schedule={asked.parallel.schedule}"
    if run.model.tied:
        yield asked.limit("model.tied", f"true{late}", (("model.tied", False),), flush)
    if modules := run.model.mtp.layers:
        yield asked.limit("model.mtp.layers", f"{modules}{late}", (("model.mtp.layers", 0),), flush)
    if run.train.precision in NOT_LATE:
        yield asked.limit("train.precision", f"{run.train.precision}{late}", (("train.precision", "bf16"),), flush)
    if has_compiled_layers(run.train, asked.parallel):
        yield asked.limit("train.compile", f"true{late}", (("train.compile", False),), flush)
    if each_micro_batch and run.data.documents:
        yield asked.limit("data.documents", f"true{late}", (("parallel.schedule", "pipedream_2bw"),), flush)


def _compile_limit(asked: AskedLayout) -> Iterator[EngineLimit]:
    if asked.schedule and asked.schedule.splits_backward and has_compiled_layers(asked.run.train, asked.parallel):
        value = f"true with parallel.schedule={asked.parallel.schedule}"
        yield asked.limit("train.compile", value, (("train.compile", False),), asked.flush)


def _family_limit(asked: AskedLayout) -> Iterator[EngineLimit]:
    family = asked.run.model.family
    if not asked.row.trains_family(family):
        yield asked.limit("model.family", family, fix=f"it runs {_or(asked.row.families)}")


def _axis_limits(asked: AskedLayout) -> Iterator[EngineLimit]:
    for axis in AXES:
        if axis in ("pp", "dp") or axis in asked.row.axes:
            continue
        if (degree := getattr(asked.parallel, axis)) > 1:
            yield asked.limit(f"parallel.{axis}", degree, ((f"parallel.{axis}", 1), *asked.fill))


def _shard_limit(asked: AskedLayout) -> Iterator[EngineLimit]:
    if asked.shards_of_some.is_there and not asked.row.hybrid_shards:
        shard = asked.parallel.shard
        yield asked.limit("parallel.shard", shard, asked.any_engine, (("parallel.shard", "all"),), (("parallel.zero", 0),))


def _router_limits(asked: AskedLayout) -> Iterator[EngineLimit]:
    """The biases of routers are stepped with the tokens of the whole step just done."""
    model = asked.run.model
    if has_experts(model) and model.router.steps_bias:
        key, conflicts = "model.router.bias_rate", (asked.late_weights, asked.late_sums, asked.workers_alone)
        yield from asked.first_conflict(key, model.router.bias_rate, conflicts, ((key, 0),))


def _preference_limits(asked: AskedLayout) -> Iterator[EngineLimit]:
    """The curves that late and compressed steps are proved by are of losses of tokens."""
    if asked.run.data.has_preferences:
        yield from asked.first_conflict("data.name", "preferences", (asked.late_weights, asked.late_sums, asked.compressed))


def _scatter_limit(asked: AskedLayout) -> Iterator[EngineLimit]:
    parallel = asked.parallel
    if parallel.scatter and parallel.pp > 1 and parallel.tp > 1:
        plain: Change = (("parallel.scatter", False),)
        yield asked.limit("parallel.scatter", True, plain, (*plain, ("parallel.sequence", True)))


def _or(names: tuple[str, ...]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


LIMITS: tuple[Callable[[AskedLayout], Iterator[EngineLimit]], ...] = (  # in the order in which a user reads them
    _class_limit,
    _pipeline_limit,
    _zero_limits,
    _schedule_limit,
    _precision_limits,
    _compile_limit,
    _family_limit,
    _axis_limits,
    _shard_limit,
    sync_limits,
    late_sum_limits,
    route_limits,
    compression_limits,
    _router_limits,
    spike_limits,
    mup_limit,
    muon_limits,
    moments_limit,
    average_limits,
    _preference_limits,
    _scatter_limit,
    offload_limits,
)
