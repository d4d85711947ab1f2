"""A layout that an engine is asked to run, and the changes that bring a run within the engine's limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ...models.families import is_made_by_transformers
from ...spec.changed_run import Change
from ...spec.run import Parallel, Run
from ..layout.schedule_of_run import legal_schedule
from ..layout.schedules import Schedule
from ..layout.update_delay import Delay
from .engine_limit import EngineLimit
from .engine_row import EngineRow

NOT_LATE = ("fp16", "fp8")  # precisions in which late weights, late sums and compressed gradients are not run


class Conflict(NamedTuple):
    """A value of another key beside which a value does not run; `change` gives the other key another value, where one would do."""

    is_there: bool
    key: str
    value: object
    change: Change = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedLayout:
    """A layout of a run that an engine is asked to run. `schedule` is None without stages."""

    row: EngineRow
    run: Run
    parallel: Parallel
    schedule: Schedule | None

    @classmethod
    def of(cls, row: EngineRow, run: Run, parallel: Parallel) -> AskedLayout:
        """The layout with its schedule."""
        return cls(row=row, run=run, parallel=parallel, schedule=legal_schedule(parallel))

    @property
    def delay(self) -> Delay | None:
        """How late the schedule updates weights; None where each step flushes."""
        return self.schedule.delay if self.schedule else None

    def limit(self, key: str, value: object, *changes: Change, fix: str = "") -> EngineLimit:
        """A value of a key that the engine does not run; changes without pairs are left out."""
        return EngineLimit(self.row.name, key, value, tuple(filter(None, changes)), fix)

    def first_conflict(self, key: str, value: object, conflicts: Iterable[Conflict], without: Change = ()) -> Iterator[EngineLimit]:
        """Yield the first conflict that is there; `without` gives this key's value up."""
        for conflict in conflicts:
            if conflict.is_there:
                yield self.limit(key, f"{value} with {conflict.key}={conflict.value}", conflict.change, without)
                return

    @property
    def any_engine(self) -> Change:
        """The change that lets another engine run the layout; none where the user names no engine."""
        return (("engine", "auto"),) if self.run.engine != "auto" else ()

    @property
    def fill(self) -> Change:
        """The change of the data degree that fills the cluster; none where it fills it anyway."""
        return () if self.parallel.dp == "auto" else (("parallel.dp", "auto"),)

    @property
    def no_stages(self) -> Change:
        """The change to a layout without pipeline stages."""
        return (("parallel.pp", 1), *self.fill, *self.any_engine)

    @property
    def flush(self) -> Change:
        """The change to the plain schedule that flushes."""
        return (("parallel.schedule", "1f1b"), *((("parallel.chunks", 1),) if self.parallel.chunks > 1 else ()))

    @property
    def zero_0(self) -> Change:
        """The change after which no rank keeps a shard."""
        return (("parallel.zero", 0),) if self.parallel.zero else ()

    @property
    def late_weights(self) -> Conflict:
        """A schedule that does not flush."""
        return Conflict(self.delay is not None, "parallel.schedule", self.parallel.schedule, self.flush)

    @property
    def late_sums(self) -> Conflict:
        """Sums of gradients that are used steps later."""
        return Conflict(self.parallel.staleness > 0, "parallel.staleness", self.parallel.staleness, (("parallel.staleness", 0),))

    @property
    def workers_alone(self) -> Conflict:
        """Replicas that step alone between steps together."""
        every = self.parallel.sync.every
        return Conflict(every > 1, "parallel.sync.every", every, (("parallel.sync.every", 1),))

    @property
    def any_shard(self) -> Conflict:
        """ZeRO of any level."""
        return Conflict(self.parallel.zero > 0, "parallel.zero", self.parallel.zero, self.zero_0)

    @property
    def shards_of_some(self) -> Conflict:
        """ZeRO over some of the data ranks."""
        parallel = self.parallel
        return Conflict(parallel.zero > 0 and parallel.shard != "all", "parallel.shard", parallel.shard, (("parallel.shard", "all"),))

    @property
    def routed_sums(self) -> Conflict:
        """Gradients summed in two levels or by parameter servers."""
        reduce = self.parallel.reduce
        return Conflict(reduce in ("hierarchical", "server"), "parallel.reduce", reduce, (("parallel.reduce", "ring"),))

    @property
    def compressed(self) -> Conflict:
        """Gradients that travel compressed."""
        name = self.parallel.compress.name
        return Conflict(name != "none", "parallel.compress.name", name, (("parallel.compress.name", "none"),))

    @property
    def late_precision(self) -> Conflict:
        """A precision of NOT_LATE."""
        precision = self.run.train.precision
        return Conflict(precision in NOT_LATE, "train.precision", precision, (("train.precision", "bf16"),))

    @property
    def moments_of_8_bits(self) -> Conflict:
        """Moments of the optimizer in 8 bits."""
        return Conflict(self.run.optim.moments == "int8", "optim.moments", "int8", (("optim.moments", "bf16"),))

    @property
    def lora(self) -> Conflict:
        """LoRA's factors."""
        return Conflict(self.run.model.lora.rank > 0, "model.lora.rank", self.run.model.lora.rank)

    @property
    def made_by_transformers(self) -> Conflict:
        """A model that transformers makes."""
        return Conflict(is_made_by_transformers(self.run.model), "model.family", self.run.model.family)
