"""An engine as data: one row of `ENGINES`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from ...models.families import FAMILIES
from ..costs.cost_model import CostModel
from ..layout.schedules import SCHEDULES, Schedule


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
