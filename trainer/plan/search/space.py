"""The layouts that a search chooses from: every legal combination of degrees, micro-batch, ZeRO, schedule, recomputation and engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Literal, NamedTuple

from ...models.families import has_experts
from ...spec.changed_run import with_values
from ...spec.numbers.divisors import divisors
from ...spec.run import Offload, Parallel, Run
from ..engines import ENGINES, PAPERS_NAME
from ..engines.engine_limits import exceeded_limits
from ..layout.mesh import replica_size
from ..layout.schedules import SCHEDULES
from ..rules.rules import OF_LAYOUT, broken_rules, offload_rule

MOST_MICROBATCH = 64  # sequences of a micro-batch

Zero = Literal[0, 1, 2, 3]
ZEROS: tuple[Zero, ...] = (0, 1, 2, 3)
Recompute = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOADS = (Offload(), Offload(optimizer=True), Offload(optimizer=True, parameters=True))


class PassChoice(NamedTuple):
    """What decides a block's costs beside the mesh: the micro-batch, sequence parallelism, recomputation."""

    microbatch: int
    sequence: bool
    recompute: Recompute


class StateChoice(NamedTuple):
    """Where weights, gradients and optimizer states are."""

    zero: Zero
    shard: int | Literal["all"]
    offload: Offload


class ScheduleChoice(NamedTuple):
    """A schedule and the chunks of a stage."""

    schedule: str
    chunks: int


class Candidate(NamedTuple):
    """One layout: its degrees, its micro-batch, the engine that trains it (None: none does), and train.compile."""

    parallel: Parallel
    microbatch: int
    engine: str | None
    compiled: bool


class Space:
    """The legal layouts of a run's model and batch on its cluster, some keys of which the user has fixed.

    What stays as the run has it: keys in `fixed`, and how messages are sent (reduce, bucket, scatter, gather, overlap, cp_comm). With
    `runnable` a layout has an engine that trains it. A schedule that does not flush trains another curve: it is taken only where it is
    fixed.
    """

    def __init__(
        self,
        run: Run,
        fixed: frozenset[str] = frozenset(),
        *,
        runnable: bool = True,
        shares: bool | None = None,
        zeros: tuple[Zero, ...] = ZEROS,
    ) -> None:
        """`shares`: only the layouts whose ranks share sequences, or do not; `zeros`: those of some ZeRO stages."""
        self.run, self.fixed, self.runnable, self.shares, self.zeros = run, fixed, runnable, shares, zeros
        given = run.parallel
        others = replica_size(given) // (given.tp * given.pp * given.cp)  # degrees that no search chooses
        self.world = run.cluster.nodes * run.cluster.gpus // others
        self._engines: dict[tuple[object, ...], tuple[str | None, ...]] = {}
        self._pipelines: dict[tuple[int, int], tuple[ScheduleChoice, ...]] = {}
        self._schedules: dict[tuple[int, int], Counter[str]] = {}
        self._engine_counts: dict[tuple[object, ...], dict[str, int]] = {}  # of each schedule
        self._states: dict[tuple[int, ...], list[StateChoice]] = {}
        self._passes: dict[tuple[int, ...], list[PassChoice]] = {}
        self._splits_sequence: dict[tuple[int, int], bool] = {}
        self._legal_recomputes: dict[tuple[bool, ...], tuple[Recompute, ...]] = {}
        self._offloads_of_zero = {zero: self._offloads(zero) for zero in ZEROS}

    def meshes(self) -> Iterator[Parallel]:
        """Yield the degrees of every legal mesh, with the rest as the simplest layout has it."""
        given = self.run.parallel
        free = {"zero": 0, "shard": "all", "schedule": "1f1b", "actions": None, "chunks": 1, "sequence": False, "recompute": "none"}
        base = replace(given, **{name: value for name, value in free.items() if f"parallel.{name}" not in self.fixed})  # type: ignore[arg-type]
        if "parallel.schedule" in self.fixed:
            base = replace(base, actions=given.actions)
        if "parallel.stages" not in self.fixed:
            base = replace(base, stages=None)
        base = replace(base, offload=Offload())  # each state has its own
        for tp, pp, cp, ep in self._degrees():
            parallel = with_values(base, dp=self.world // (tp * pp * cp), tp=tp, pp=pp, cp=cp, ep=ep)
            if "parallel.dp" in self.fixed and given.dp not in ("auto", parallel.dp):
                continue
            if not self._breaks_rules(parallel, sequence=False):
                yield parallel

    def microbatches(self, parallel: Parallel) -> list[int]:
        """The sizes of a micro-batch on a mesh."""
        assert parallel.dp != "auto"
        each = self.run.train.batch // parallel.dp
        if "train.microbatch" in self.fixed:
            return [self.run.train.microbatch] if each % self.run.train.microbatch == 0 else []
        return divisors(each, MOST_MICROBATCH)

    def passes(self, parallel: Parallel) -> list[PassChoice]:
        """The passes of a mesh."""
        key = (parallel.tp, parallel.pp, parallel.cp, parallel.ep)
        found = self._passes.get(key)
        if found is None:
            found = self._passes[key] = self._legal_passes(parallel)
        return found

    def _legal_passes(self, parallel: Parallel) -> list[PassChoice]:
        sequences = self._values("parallel.sequence", (False, True) if self._can_split_sequence(parallel) else (False,))
        recomputes: tuple[Recompute, ...] = self._values("parallel.recompute", self._recomputes(parallel))
        return [PassChoice(*each) for each in product(self.microbatches(parallel), sequences, recomputes)]

    def states(self, parallel: Parallel) -> list[StateChoice]:
        """The states of a mesh."""
        key = (parallel.tp, parallel.pp, parallel.cp, parallel.ep)
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = self._legal_states(parallel)
        return found

    def _legal_states(self, parallel: Parallel) -> list[StateChoice]:
        shards = self._shards(parallel)
        return [
            StateChoice(zero, shard, offload)
            for zero in self._values("parallel.zero", ZEROS)
            if zero in self.zeros and (zero == parallel.zero or not self._breaks_rules(parallel, zero=zero))
            for shard in (shards if zero else shards[:1])
            for offload in self._offloads_of_zero[zero]
        ]

    def pipelines(self, parallel: Parallel, microbatch: int) -> tuple[ScheduleChoice, ...]:
        """The schedules of a mesh's stages with a micro-batch; one stage has one."""
        assert parallel.dp != "auto"
        micros = self.run.train.batch // (parallel.dp * microbatch)
        found = self._pipelines.get((parallel.pp, micros))
        if found is None:
            found = self._pipelines[parallel.pp, micros] = tuple(self._legal_pipelines(parallel, microbatch))
        return found

    def engines(self, parallel: Parallel, state: StateChoice, pipeline: ScheduleChoice) -> tuple[str | None, ...]:
        """The engines that train a layout of a mesh; (None,) where none does and layouts need not run."""
        key = (self._engine_key(parallel), state.shard == "all", state.zero, state.offload, pipeline.schedule)
        found = self._engines.get(key)
        if found is None:
            found = self._engines[key] = self._find_engines(self.layout(parallel, state, pipeline))
        return found

    def size(self, parallel: Parallel) -> int:
        """The number of legal layouts of a mesh."""
        assert parallel.dp != "auto"
        any_microbatch = self._any_microbatch()
        passes = Counter([sequence for microbatch, sequence, _ in self.passes(parallel) if microbatch == any_microbatch])
        states = Counter((zero, shard == "all", moved.optimizer, moved.parameters) for zero, shard, moved in self.states(parallel))
        schedules, mesh = self._schedules_of(parallel), self._engine_key(parallel)
        size = 0
        for sequence, times in passes.items():
            for kind, many in states.items():
                known = self._engine_counts.setdefault((mesh, sequence, kind), {})
                for schedule, each in schedules.items():
                    if schedule not in known:
                        known[schedule] = self._count_engines(with_values(parallel, sequence=sequence), kind, schedule)
                    size += times * many * each * known[schedule]
        return size

    def _count_engines(self, parallel: Parallel, kind: tuple[Zero, bool, bool, bool], schedule: str) -> int:
        """How many engines a layout has whose states are of a kind: their ZeRO stage, whether all data ranks shard them, what is
        offloaded."""
        zero, whole, optimizer, parameters = kind
        state = StateChoice(zero, "all" if whole else 1, Offload(optimizer=optimizer, parameters=parameters))
        return len(self.engines(parallel, state, ScheduleChoice(schedule, 1)))

    def _schedules_of(self, parallel: Parallel) -> Counter[str]:
        """How many pairs of a micro-batch and a number of chunks each schedule has on a mesh."""
        assert parallel.dp != "auto"
        found = self._schedules.get((parallel.pp, parallel.dp))
        if found is None:
            found = self._schedules[parallel.pp, parallel.dp] = Counter(
                pipeline.schedule for microbatch in self.microbatches(parallel) for pipeline in self.pipelines(parallel, microbatch)
            )
        return found

    @staticmethod
    def layout(parallel: Parallel, state: StateChoice, pipeline: ScheduleChoice) -> Parallel:
        """The degrees and the pass of a mesh with the rest of a layout."""
        return with_values(
            parallel,
            zero=state.zero,
            shard=state.shard,
            offload=state.offload,
            schedule=pipeline.schedule,
            chunks=pipeline.chunks,
        )

    def _degrees(self) -> Iterator[tuple[int, int, int, int]]:
        """Every (tp, pp, cp, ep) that divides the cluster, ep the data ranks."""
        given, world = self.run.parallel, self.world
        experts = self.run.model.experts if has_experts(self.run.model) else 1
        for tp in self._values("parallel.tp", divisors(world)):
            for pp in self._values("parallel.pp", divisors(world // tp) if world % tp == 0 else ()):
                for cp in self._values("parallel.cp", divisors(world // (tp * pp)) if world % (tp * pp) == 0 else ()):
                    if world % (tp * pp * cp) or (self.shares is not None and self.shares is not (cp > 1)):
                        continue
                    dp = world // (tp * pp * cp)
                    for ep in self._values("parallel.ep", [each for each in divisors(dp) if experts % each == 0] or [given.ep]):
                        yield tp, pp, cp, ep

    def _breaks_rules(self, parallel: Parallel, **changes: Any) -> bool:
        """Whether a layout with these changes breaks a rule, whatever its schedule and offload are."""
        plain = with_values(parallel, schedule="1f1b", chunks=1, actions=None, stages=None, offload=Offload(), **changes)
        return bool(broken_rules(self.run, plain, self._any_microbatch(), OF_LAYOUT))

    def _any_microbatch(self) -> int:
        return self.run.train.microbatch if "train.microbatch" in self.fixed else 1

    def _can_split_sequence(self, parallel: Parallel) -> bool:
        """Whether the ranks of a mesh can split a sequence; its length, tp and cp decide it."""
        key = (parallel.tp, parallel.cp)
        found = self._splits_sequence.get(key)
        if found is None:
            found = self._splits_sequence[key] = parallel.tp > 1 and not self._breaks_rules(parallel, sequence=True)
        return found

    def _recomputes(self, parallel: Parallel) -> tuple[Recompute, ...]:
        """What the layers of a mesh can recompute; its axes decide it, whatever their degrees are."""
        key = (parallel.tp > 1, parallel.pp > 1, parallel.cp > 1, parallel.ep > 1)
        found = self._legal_recomputes.get(key)
        if found is None:
            legal = [each for each in RECOMPUTES if each == parallel.recompute or not self._breaks_rules(parallel, recompute=each)]
            found = self._legal_recomputes[key] = tuple(legal)
        return found

    def _shards(self, parallel: Parallel) -> tuple[int | Literal["all"], ...]:
        """All data ranks, or as many of them as fill whole nodes."""
        assert parallel.dp != "auto"
        data = parallel.dp * parallel.cp
        some = [
            each for each in divisors(data) if each < data and each * parallel.tp % self.run.cluster.gpus == 0 and each % parallel.ep == 0
        ]
        shards: tuple[int | Literal["all"], ...] = self._values("parallel.shard", ("all", *some))
        return shards

    def _offloads(self, zero: Zero) -> list[Offload]:
        """What a ZeRO stage may offload, where the user has not said so."""
        given = self.run.parallel.offload
        fixed = [name for name in ("optimizer", "parameters") if f"parallel.offload.{name}" in self.fixed]
        return [
            each
            for each in OFFLOADS
            if all(getattr(each, name) == getattr(given, name) for name in fixed)
            and not broken_rules(self.run, Parallel(zero=zero, offload=each), 1, (offload_rule,))
        ]

    def _legal_pipelines(self, parallel: Parallel, microbatch: int) -> Iterator[ScheduleChoice]:
        same_curve = tuple(name for name, row in SCHEDULES.items() if row.flushes)
        for schedule in self._values("parallel.schedule", same_curve if parallel.pp > 1 else ("1f1b",)):
            for chunks in self._values("parallel.chunks", self._chunks(parallel, schedule)):
                changed = with_values(parallel, schedule=schedule, chunks=chunks)
                if not broken_rules(self.run, changed, microbatch, OF_LAYOUT):
                    yield ScheduleChoice(schedule, chunks)

    def _chunks(self, parallel: Parallel, schedule: str) -> tuple[int, ...]:
        """Every divisor of a stage's layers."""
        if schedule not in SCHEDULES or not SCHEDULES[schedule].chunked or parallel.pp == 1:
            return (1,)
        return tuple(divisors(self.run.model.repeated_layers // parallel.pp))

    def _engine_key(self, parallel: Parallel) -> tuple[bool, ...]:
        """All of a mesh and its pass that the limits of engines read; tests/plan/test_search.py holds that nothing else is."""
        heads = self.run.model.kv_heads or self.run.model.heads
        return parallel.pp > 1, parallel.tp > 1, parallel.tp > heads, parallel.cp > 1, parallel.ep > 1, parallel.sequence

    def _find_engines(self, parallel: Parallel) -> tuple[str | None, ...]:
        named = self.run.engine if "engine" in self.fixed and self.run.engine != "auto" else None
        if named == PAPERS_NAME:
            return () if self.runnable else (None,)
        rows = [row for row in ENGINES.values() if named in (None, row.name)]
        runs = tuple(row.name for row in rows if next(exceeded_limits(row, self.run, parallel), None) is None)
        return runs or (() if self.runnable else (None,))

    def _values(self, key: str, free: Any) -> Any:
        """The value of a fixed key, or those that are free."""
        if key not in self.fixed or (value := _value(self.run, key)) == "auto":
            return free
        return (value,)


def _value(run: Run, key: str) -> Any:
    part: Any = run
    for name in key.split("."):
        part = getattr(part, name)
    return part
