"""The search: every legal layout is costed, or left out because a lower bound shows that it can't be among the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf
from typing import NamedTuple

from ...spec.run import Parallel
from ..axes.axis import ActivationForm
from ..axes.dp import CONTENTION
from ..costs.block_costs import BlockCosts
from ..costs.cost_context import CostContext
from ..costs.local_tensors import block_split
from ..costs.passes_bytes import passes_bytes
from ..engines import ENGINES
from ..layout.layout import Layout, StageKind, mesh_of
from ..layout_cost import has_times, hop_seconds, layout_blocks, peak_bytes, stage_costs, step_seconds
from ..run_layout import layout_on
from ..stage_cost import StageCost
from .bounds import ROUNDING, Bounds, Form, StagedSchedule, pass_seconds, staged_schedule
from .front import Best, CostedLayout, Front, mesh_key
from .space import Candidate, ScheduleChoice, Space, StateChoice

SLOWEST = 1.25  # times the fastest layout's seconds: slower ones, which waste more than a fifth of the cluster, are not kept


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search: the best layout of each of the best meshes, the front of time against memory, the sizes of the space."""

    best: tuple[CostedLayout, ...]
    front: tuple[CostedLayout, ...]
    legal: int  # layouts
    costed: int  # of them; the others were discarded by bounds


class Allowance(NamedTuple):
    """A schedule of a pass: the least seconds of a step, the least bytes of activations on the first stage, and the bytes that it may hold
    beside them (with more, a layout is not among the best and not on the front)."""

    staged: StagedSchedule
    seconds: float
    kept: float
    bytes: float


class LeastStates(NamedTuple):
    """The least costs of a layout's states, which do not depend on its pass: bytes on a rank of the first stage, held all the time and in
    the optimizer's step; seconds of the data axis and of the optimizer, with so many micro-batches."""

    fixed: int
    step: int
    seconds: float
    micros: int

    def least_seconds(self, micros: int) -> float:
        """The seconds with other micro-batches: a message travels once a step, or with each of them."""
        return self.seconds * min(1.0, micros / self.micros)


class LayoutSearch:
    """One search over a space."""

    def __init__(self, space: Space, *, rows: int, by_memory: bool = False, headroom: float = 0.0) -> None:
        """`rows`: the meshes to find; `headroom`: the share of a rank's memory that a layout leaves free."""
        self.space, self.run = space, space.run
        self.context = CostContext(space.run)
        self.capacity = int(self.context.capacity * (1 - headroom))
        self.bounds = Bounds(self.context, runnable=space.runnable)
        self.best, self.front = Best(rows, by_memory=by_memory), Front()
        self.slowest = inf if by_memory else SLOWEST
        self.costed = 0
        self._least_states: dict[tuple[object, ...], LeastStates] = {}  # of one mesh
        self._least_fixed: dict[StateChoice, float] = {}
        self._staged: dict[tuple[int, int], list[StagedSchedule]] = {}  # of so many stages and micro-batches
        self._engines_of: dict[tuple[object, ...], tuple[str | None, ...]] = {}

    def run_all(self) -> SearchResult:
        """Search the whole space, meshes with the least bound first; layouts whose time is not known come last."""
        legal, meshes = 0, list[tuple[float, Parallel]]()
        for parallel in self.space.meshes():
            legal += self.space.size(parallel)
            meshes.append((min(map(self.bounds.seconds, self._sequences(parallel))), parallel))
        meshes.sort(key=lambda row: row[0])
        for timed in (True, False):
            for seconds, parallel in meshes:
                least = replace(parallel, zero=3, recompute="full")
                if self._may_matter(parallel, seconds if timed else inf, self.bounds.bytes(least, 1)):
                    self._search_mesh(parallel, timed)
        return SearchResult(
            best=tuple(self._in_time(self.best.ranked())), front=tuple(self._in_time(self.front.rows)), legal=legal, costed=self.costed
        )

    def _in_time(self, rows: list[CostedLayout]) -> Iterator[CostedLayout]:
        limit = self.slowest * self.front.rows[0].seconds if self.front.rows else inf
        return (row for row in rows if row.seconds <= limit)

    def _sequences(self, parallel: Parallel) -> list[Parallel]:
        return [replace(parallel, sequence=each) for each in ((False, True) if parallel.tp > 1 else (False,))]

    def _search_mesh(self, parallel: Parallel, timed: bool) -> None:
        states = [each for each in self.space.states(parallel) if self._is_timed(each) == timed]
        if not states:
            return
        self._least_states, self._engines_of = {}, {}
        self._least_fixed = {each: self.bounds.fixed_bytes(replace(parallel, zero=each.zero, offload=each.offload)) for each in states}
        fixed = min(self._least_fixed.values())
        passes = [(self.bounds.seconds(each), each, microbatch) for each, microbatch in self._passes(parallel)]
        for seconds, each, microbatch in sorted(passes, key=lambda row: row[0]):
            assert parallel.dp != "auto"
            pipelines = self._on_stages(each, self.run.train.batch // (parallel.dp * microbatch))
            held = min([staged.partition.counts[0] * staged.in_flight for staged in pipelines], default=inf)
            least = fixed + microbatch * held * self.bounds.split(each).saved * (1 - ROUNDING)
            if self._may_matter(each, seconds if timed else inf, least):
                self._search_pass(each, microbatch, states, pipelines, timed)

    def _is_timed(self, state: StateChoice) -> bool:
        """Whether the seconds of such layouts are known."""
        return self.context.rates is not None and not (state.offload.optimizer or state.offload.parameters)

    def _passes(self, parallel: Parallel) -> Iterator[tuple[Parallel, int]]:
        """A mesh with each kind of pass, and its micro-batch."""
        splits: dict[tuple[bool, str], Parallel] = {}
        for row in self.space.passes(parallel):
            key = (row.sequence, row.recompute)
            if key not in splits:
                splits[key] = replace(parallel, sequence=row.sequence, recompute=row.recompute)
            yield splits[key], row.microbatch

    def _search_pass(
        self, parallel: Parallel, microbatch: int, states: list[StateChoice], pipelines: list[StagedSchedule], timed: bool
    ) -> None:
        """Cost the layouts of one mesh and one kind of pass."""
        assert parallel.dp != "auto"
        micros = self.run.train.batch // (parallel.dp * microbatch)
        allowances_of: dict[frozenset[Form], list[Allowance]] = {}
        for zero, some in groupby(states, key=lambda state: state.zero):
            forms = frozenset(self.bounds.forms(replace(parallel, zero=zero)))
            if forms not in allowances_of:
                allowances_of[forms] = self._allowances(parallel, pipelines, forms, microbatch, micros, timed)
            allowances = allowances_of[forms]
            most = max([each.bytes for each in allowances], default=0.0)
            for state in some:
                fixed = self._least_fixed[state]
                if fixed < most:
                    for each in allowances:
                        if fixed < each.bytes:
                            self._search_engines(parallel, microbatch, state, each, micros)

    def _on_stages(self, parallel: Parallel, micros: int) -> list[StagedSchedule]:
        """The schedules of a mesh with so many micro-batches."""
        found = self._staged.get((parallel.pp, micros))
        if found is None:
            assert parallel.dp != "auto"
            pipelines = self.space.pipelines(parallel, self.run.train.batch // (parallel.dp * micros))
            found = self._staged[parallel.pp, micros] = [staged_schedule(self.context, parallel, each, micros) for each in pipelines]
        return found

    def _allowances(
        self, parallel: Parallel, pipelines: list[StagedSchedule], forms: frozenset[Form], microbatch: int, micros: int, timed: bool
    ) -> list[Allowance]:
        """What the layouts of one pass may hold under each of its schedules; those that can't matter are left out."""
        costs = [self._blocks(parallel, microbatch, *form) for form in forms]
        seconds_of = [(pass_seconds(blocks), self._send_seconds(parallel, blocks)) for blocks in costs] if timed else []
        logits = min([blocks.head.logits for blocks in costs]) if parallel.pp == 1 else 0
        least: dict[StageKind, int] = {}
        found: list[Allowance] = []
        for staged in pipelines:
            seconds = inf
            if timed:
                seconds = min([staged.least_seconds(each, send) for each, send in seconds_of]) * (1 + self.context.tail)
                seconds += self.context.step_overhead
                if self.front.rows and seconds > self.slowest * self.front.rows[0].seconds:
                    continue
            kind = staged.partition.kinds[0]
            if kind not in least:
                least[kind] = min([passes_bytes(self.context, blocks, kind) for blocks in costs]) if self.space.runnable else 0
            saved = min([blocks.layer.saved for blocks in costs])
            kept = kind.layers * saved * staged.in_flight + logits + least[kind]
            enters = self.best.may_enter(mesh_key(parallel), seconds, 0)
            most = self.capacity + 1 if enters else min(self.capacity + 1, self.front.least_peak(seconds))
            if most > kept:
                found.append(Allowance(staged, seconds, kept, most - kept))
        return found

    def _search_engines(self, parallel: Parallel, microbatch: int, state: StateChoice, allowed: Allowance, micros: int) -> None:
        """Cost a layout with each engine that trains it, unless the first layout of the mesh with the same states shows that it does not
        matter."""
        staged = allowed.staged
        for engine in self._engines(parallel, state, staged.choice):
            key = (state, engine, micros > 1, staged.partition.kinds, staged.partition.is_folded)
            known = self._least_states.get(key)
            if known and not self._may_matter(
                parallel, allowed.seconds + known.least_seconds(micros), known.fixed + max(allowed.kept, known.step)
            ):
                continue
            layout = self.space.layout(parallel, state, staged.choice)
            self._least_states[key] = self._cost(Candidate(layout, microbatch, engine), allowed.seconds)

    def _engines(self, parallel: Parallel, state: StateChoice, pipeline: ScheduleChoice) -> tuple[str | None, ...]:
        key = (state, pipeline.schedule, parallel.sequence)
        found = self._engines_of.get(key)
        if found is None:
            layout = self.space.layout(parallel, state, pipeline)
            found = self._engines_of[key] = self.space.engines(layout)
        return found

    def _send_seconds(self, parallel: Parallel, blocks: BlockCosts) -> float:
        """The exposed seconds of a micro-batch's messages into and out of one part of the model."""
        return hop_seconds(replace(parallel, schedule="1f1b", chunks=1), self.context.wires(mesh_of(parallel, self.context.world)), blocks)

    def _blocks(self, parallel: Parallel, microbatch: int, form: ActivationForm, fused: bool) -> BlockCosts:
        split = block_split(parallel, microbatch, form, fused=fused)
        return self.context.block_costs(split, self.context.wires(mesh_of(parallel, self.context.world)))

    def _cost(self, candidate: Candidate, seconds: float) -> LeastStates:
        """Cost one layout, as far as its figures may matter: its bytes, a bound of its seconds, its seconds."""
        layout = layout_on(ENGINES[candidate.engine] if candidate.engine else None, self.context, candidate.parallel, candidate.microbatch)
        blocks = layout_blocks(self.context, layout)
        kinds = stage_costs(self.context, layout, blocks)
        self.costed += 1
        peak, _ = peak_bytes(layout, kinds)
        if self._may_matter(candidate.parallel, seconds, peak):
            self._add(candidate, layout, blocks, kinds, peak)
        first, tail = kinds[layout.partition.kind_of_stage[0]], 1 + self.context.tail
        return LeastStates(
            fixed=first.weights + first.gradients + first.optimizer + first.zero_buffers + first.overhead,
            step=first.step_bytes,
            seconds=max([kind.step + tail * CONTENTION * sum([row.seconds for row in kind.data]) for kind in kinds]) * (1 - ROUNDING),
            micros=layout.micros,
        )

    def _add(self, candidate: Candidate, layout: Layout, blocks: BlockCosts, kinds: list[StageCost], peak: int) -> None:
        """Keep a layout, unless its seconds show that it does not matter."""
        seconds = inf
        if has_times(self.context, layout):
            least = step_seconds(self.context, layout, blocks, kinds, simulates=False).step
            if not self._may_matter(candidate.parallel, least, peak):
                return
            seconds = step_seconds(self.context, layout, blocks, kinds).step
        found = CostedLayout(seconds, peak, candidate)
        self.best.add(mesh_key(candidate.parallel), found)
        self.front.add(found)

    def _may_matter(self, parallel: Parallel, seconds: float, peak: float) -> bool:
        """Whether a layout with at least these seconds and bytes may fit and be among the best, or on the front."""
        if peak > self.capacity:
            return False
        if self.front.rows and seconds > self.slowest * self.front.rows[0].seconds:
            return False
        return not self.front.beats(seconds, peak) or self.best.may_enter(mesh_key(parallel), seconds, peak)
