"""The engines that train, one row each: what each runs, what it costs, and its class."""

from __future__ import annotations

from ...spec.run import Parallel, Run
from ..costs.cost_model import CostModel
from ..deepspeed.cost_model import DeepSpeedCosts
from .engine_limits import EngineLimit, exceeded_limits
from .engine_row import EngineRow

PAPERS = CostModel()  # of layouts that no engine runs
PAPERS_NAME = "papers"  # as a run's engine: plan what the papers describe, such as a run of another framework
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

    With `auto` an engine that does not run the layout is left out; `papers` is none that runs.
    """
    if run.engine == PAPERS_NAME:
        return None, (EngineLimit(PAPERS_NAME, "engine", PAPERS_NAME, ((("engine", "auto"),),)),)
    for row in ENGINES.values():
        if run.engine == row.name or (run.engine == "auto" and row.pipeline == (parallel.pp > 1)):
            limits = tuple(exceeded_limits(row, run, parallel))
            return (row, limits) if run.engine != "auto" or not limits else (None, limits)
    return None, ()


def cost_model(engine: str | None) -> CostModel:
    """The cost model of an engine; without one, the papers'."""
    return ENGINES[engine].costs if engine else PAPERS
