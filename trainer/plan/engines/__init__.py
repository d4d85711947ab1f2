"""The engines that train, one row each: what each runs, what it costs, and its class."""

from __future__ import annotations

from ...spec.run import PAPERS_NAME as PAPERS_NAME
from ...spec.run import Parallel, Run
from ..costs.cost_model import CostModel
from ..costs.muon import MUON
from ..costs.precision import has_moments
from ..deepspeed.cost_model import DeepSpeedCosts
from ..layout.schedule_of_run import delay_of
from ..native.cost_model import NativeCosts
from .engine_limit import EngineLimit
from .engine_limits import exceeded_limits
from .engine_row import EngineRow

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
            executes="none",
            precisions=("fp32", "bf16", "fp16"),
            offload=("optimizer", "parameters"),
            offloads_gradients=True,
            has_deepspeed_config=True,
            source="deepspeed 0.19 ZeRO",
        ),
        EngineRow(
            name="pipe",
            engine_class="distrain.trainer.engines.deepspeed.pipe:PipeEngine",
            costs=DeepSpeedCosts(),
            axes=("pp", "dp", "cp", "ep", "tp"),
            zero=(0, 1),
            native_schedules=("1f1b", "dualpipev"),
            executes="plain",
            whole_models=False,
            precisions=("fp32", "bf16", "fp16"),
            offload=(),
            has_deepspeed_config=True,
            source="deepspeed 0.19 PipelineEngine",
        ),
        EngineRow(
            name="native",
            engine_class="distrain.trainer.engines.native.engine:NativeEngine",
            delayed_class="distrain.trainer.engines.native.delayed_engine:DelayedEngine",
            compressed_class="distrain.trainer.engines.native.compressed_engine:CompressedEngine",
            stale_class="distrain.trainer.engines.native.stale_engine:StaleEngine",
            costs=NativeCosts(),
            axes=("pp", "dp", "cp", "ep", "tp"),
            zero=(0, 1, 2, 3),
            native_schedules=(),
            executes="all",
            precisions=("fp32", "bf16", "fp16", "fp8"),
            offload=("optimizer", "parameters"),
            shards_experts=True,
            hybrid_shards=True,
            steps_alone=True,
            gathers_once=True,
            shards_hf=False,
            routes_sums=True,
            compresses=True,
            steps_matrices=True,
            rounds_moments=True,
            averages_weights=True,
            rates_by_width=True,
            skips_spikes=True,
            fp16_on_cpu=True,
            source="torch",
        ),
    )
}


def engine_for(run: Run, parallel: Parallel) -> tuple[EngineRow | None, tuple[EngineLimit, ...]]:
    """The engine that a run names, or with `engine: auto` the one for its layout, and its limits that the layout exceeds (none: it runs).

    With `auto` that is `native` at one data-parallel rank on a GPU, for schedules without a flush, for replicas that step alone, for sums
    that are used late, in two levels or by parameter servers, for fp8, for moments in bf16 or 8 bits, for Muon, for muP, where weights are
    averaged and where spikes are skipped, DeepSpeed's elsewhere, and another one for a layout that the first choice does not run; where
    none does, there is no engine. `papers` is none that runs.
    """
    if run.engine == PAPERS_NAME:
        return None, (EngineLimit(PAPERS_NAME, "engine", PAPERS_NAME, ((("engine", "auto"),),)),)
    if run.engine != "auto":
        named = ENGINES.get(run.engine)
        return named, tuple(exceeded_limits(named, run, parallel)) if named else ()
    first = ENGINES[_first_choice(run, parallel)]
    limits = tuple(exceeded_limits(first, run, parallel))
    if not limits:
        return first, ()
    for other in ENGINES.values():
        if other is not first and next(exceeded_limits(other, run, parallel), None) is None:
            return other, ()
    return None, limits


def _first_choice(run: Run, parallel: Parallel) -> str:
    if _key_of_native(run, parallel):
        return "native"
    if run.cluster.device.kind == "cuda" and data_ranks(run, parallel) == 1:
        return "native"
    return "pipe" if parallel.pp > 1 else "zero"


def _key_of_native(run: Run, parallel: Parallel) -> str:
    """A key and its value that only `native` runs, whatever else a layout has; "" where there is none."""
    if delay_of(parallel):
        return f"parallel.schedule={parallel.schedule}"
    if parallel.sync.every > 1:
        return f"parallel.sync.every={parallel.sync.every}"
    if parallel.staleness:
        return f"parallel.staleness={parallel.staleness}"
    if parallel.reduce in ("hierarchical", "server"):
        return f"parallel.reduce={parallel.reduce}"
    if run.train.precision == "fp8":
        return "train.precision=fp8"
    if run.optim.moments != "fp32" and has_moments(run.optim):
        return f"optim.moments={run.optim.moments}"
    if run.train.skip_spikes:
        return f"train.skip_spikes={run.train.skip_spikes:g}"
    if run.optim.ema:
        return f"optim.ema={run.optim.ema}"
    if run.optim.mup:
        return f"optim.mup={run.optim.mup}"
    return f"optim.name={MUON}" if run.optim.name == MUON else ""


def data_ranks(run: Run, parallel: Parallel) -> int:
    """The ranks over which gradients are summed."""
    world = run.cluster.nodes * run.cluster.gpus
    return world // (parallel.tp * parallel.pp) if parallel.dp == "auto" else parallel.dp * parallel.cp


def engine_reason(run: Run, parallel: Parallel, chosen: str) -> str:
    """Why `engine: auto` takes an engine, in words."""
    first = _first_choice(run, parallel)
    if chosen == first and (key := _key_of_native(run, parallel)):
        return f"it alone runs {key}"
    if chosen == first:
        return "one data-parallel rank on a GPU" if chosen == "native" else ""
    return next((limit.says for limit in exceeded_limits(ENGINES[first], run, parallel)), "")


def cost_model(engine: str | None) -> CostModel:
    """The cost model of an engine; without one, the papers'."""
    return ENGINES[engine].costs if engine else PAPERS
