"""An engine as data: one row of `ENGINES`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

from ...models.families import FAMILIES
from ..costs.cost_model import CostModel
from ..layout.schedules import SCHEDULES, Schedule


@dataclass(frozen=True, kw_only=True, eq=False)  # rows are compared by identity: they are keys of caches
class EngineRow:
    """An engine. `axes` are those that it splits over more than one rank; of `engine: auto` the first row with or without "pp" is taken."""

    name: str
    engine_class: str  # MODULE:CLASS, a subclass of trainer/engines/engine.py's Engine; "": it is planned, and can't train
    costs: CostModel
    delayed_class: str = ""  # MODULE:CLASS for schedules without a flush; "": it is the same
    compressed_class: str = ""  # MODULE:CLASS for compressed gradients; "": it is the same
    stale_class: str = ""  # MODULE:CLASS where sums of gradients are used late (parallel.staleness); "": it does not run that
    axes: tuple[str, ...]
    zero: tuple[int, ...]
    native_schedules: tuple[str, ...]  # those that it has instructions of its own for
    executes: Literal["none", "plain", "flushing", "all"]  # the schedules that it runs from their actions
    precisions: tuple[str, ...]
    offload: tuple[str, ...]  # what it offloads to the host: fields of parallel.offload
    source: str
    offloads_gradients: bool = False  # with the optimizer's states gradients go to the host, each micro-batch's
    shards_experts: bool = False  # ZeRO 3 shards experts that ranks share out
    hybrid_shards: bool = False  # ZeRO shards over some of the data ranks (parallel.shard)
    steps_alone: bool = False  # replicas step alone between steps together (parallel.sync.every)
    gathers_once: bool = False  # ZeRO 3 gathers weights once a step where it should (parallel.gather=step)
    shards_hf: bool = True  # ZeRO 3 shards models that transformers makes
    routes_sums: bool = False  # gradients are summed in two levels or by parameter servers where the run says so (parallel.reduce)
    compresses: bool = False  # gradients travel as two factors where the run says so (parallel.compress)
    steps_matrices: bool = False  # the optimizer steps whole matrices where the run says so (optim.name=muon)
    rounds_moments: bool = False  # moments are kept in bf16 or 8 bits where the run says so (optim.moments)
    averages_weights: bool = False  # it keeps an average of the weights where the run says so (optim.ema)
    rates_by_width: bool = False  # learning rates differ by weight where the run says so (optim.mup)
    skips_spikes: bool = False  # it skips steps beyond limits that it is given (train.skip_spikes)
    fp16_on_cpu: bool = False  # it computes in fp16 on every CPU, slowly
    has_deepspeed_config: bool = False  # `show engine` prints it
    whole_models: bool = True  # it trains without pipeline stages too

    @cached_property
    def pipeline(self) -> bool:
        """Whether it runs pipeline stages."""
        return "pp" in self.axes

    @property
    def classes(self) -> tuple[str, ...]:
        """MODULE:CLASS of each of its classes."""
        return tuple(filter(None, (self.engine_class, self.delayed_class, self.compressed_class, self.stale_class)))

    @property
    def schedules(self) -> tuple[str, ...]:
        """The pipeline schedules that it runs."""
        return _schedules(self, tuple(SCHEDULES.items()))

    def runs_schedule(self, name: str, given: Schedule | None = None) -> bool:
        """Whether it runs a schedule of SCHEDULES, or one `given` by a file."""
        schedule = given or SCHEDULES[name]
        runs = {"none": False, "plain": schedule.is_plain and not schedule.simulated, "flushing": schedule.flushes, "all": True}
        return name in self.native_schedules or runs[self.executes]

    @property
    def runs_files(self) -> bool:
        """Whether it runs any schedule that a file lists."""
        return self.pipeline and self.executes in ("flushing", "all")

    @property
    def families(self) -> tuple[str, ...]:
        """The model families that it trains."""
        return tuple(filter(self.trains_family, FAMILIES))

    def trains_family(self, name: str) -> bool:
        """Whether it trains a family of FAMILIES: one with a module, which an engine of pipelines alone must be able to split."""
        family = FAMILIES[name]
        return bool(family.module) and (self.whole_models or "pp" in family.axes)


@cache
def _schedules(row: EngineRow, schedules: tuple[tuple[str, Schedule], ...]) -> tuple[str, ...]:
    return tuple(name for name, _ in schedules if row.runs_schedule(name))
