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
from ..engines import ENGINES
from ..layout.layout import LayerPartition, Layout, mesh_of
from ..layout.run_schedule import schedule_of
from ..layout.schedules import Schedule
from ..layout_cost import has_times, layout_blocks, peak_bytes, stage_costs, step_seconds
from ..run_layout import layout_on, stage_partition
from ..stage_cost import StageCost
from .bounds import ROUNDING, Bounds, least_fill, pipeline_seconds
from .front import Best, CostedLayout, Front, mesh_key
from .space import Candidate, PassChoice, ScheduleChoice, Space, StateChoice

SLOWEST = 1.25  # times the fastest layout's seconds: slower ones, which waste more than a fifth of the cluster, are not kept


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search: the best layout of each of the best meshes, the front of time against memory, the sizes of the space."""

    best: tuple[CostedLayout, ...]
    front: tuple[CostedLayout, ...]
    legal: int  # layouts
    costed: int  # of them; the others were discarded by bounds


class StagedSchedule(NamedTuple):
    """A schedule of a mesh: the layers of its stages, the micro-batches that the first one holds at once."""

    pipeline: ScheduleChoice
    schedule: Schedule
    partition: LayerPartition
    in_flight: float


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
        passes = [(self.bounds.seconds(each), each, row) for each, row in self._passes(parallel)]
        for seconds, each, row in sorted(passes, key=lambda row: row[0]):
            least = self.bounds.bytes(replace(each, zero=3), row.microbatch)
            if self._may_matter(each, seconds if timed else inf, least):
                self._search_pass(each, row, states, timed)

    def _is_timed(self, state: StateChoice) -> bool:
        """Whether the seconds of such layouts are known."""
        return self.context.rates is not None and not (state.offload.optimizer or state.offload.parameters)

    def _passes(self, parallel: Parallel) -> Iterator[tuple[Parallel, PassChoice]]:
        for row in self.space.passes(parallel):
            yield replace(parallel, sequence=row.sequence, recompute=row.recompute), row

    def _search_pass(self, parallel: Parallel, row: PassChoice, states: list[StateChoice], timed: bool) -> None:
        """Cost the layouts of one mesh and one kind of pass."""
        assert parallel.dp != "auto"
        micros = self.run.train.batch // (parallel.dp * row.microbatch)
        pipelines = [self._on_stages(parallel, each, micros) for each in self.space.pipelines(parallel, row.microbatch)]
        for zero, some in groupby(states, key=lambda state: state.zero):
            forms = [self._blocks(parallel, row.microbatch, *form) for form in self.bounds.forms(replace(parallel, zero=zero))]
            allowances = [(staged, *self._allowed_bytes(parallel, staged, forms, micros, timed)) for staged in pipelines]
            most = max((allowed for *_, allowed in allowances), default=0.0)
            for state in some:
                fixed = self._least_fixed[state]
                if fixed < most:
                    for staged, seconds, kept, allowed in allowances:
                        if fixed < allowed:
                            self._search_engines(parallel, row, state, staged, seconds, kept, micros)

    def _on_stages(self, parallel: Parallel, pipeline: ScheduleChoice, micros: int) -> StagedSchedule:
        changed = replace(parallel, schedule=pipeline.schedule, chunks=pipeline.chunks)
        schedule = schedule_of(changed)
        in_flight = schedule.in_flight(0, parallel.pp, micros, pipeline.chunks) if parallel.pp > 1 else 1.0
        return StagedSchedule(pipeline, schedule, stage_partition(self.context, changed), in_flight)

    def _allowed_bytes(
        self, parallel: Parallel, staged: StagedSchedule, forms: list[BlockCosts], micros: int, timed: bool
    ) -> tuple[float, float, float]:
        """(the least seconds of a step, the least bytes of activations on the first stage, the bytes that it may hold beside them: with
        more, a layout is not among the best and not on the front)."""
        seconds = inf
        if timed:
            fill = 0.0 if parallel.stages else least_fill(staged.schedule, staged.pipeline.chunks)
            seconds = min(pipeline_seconds(blocks, staged.partition, micros, fill) for blocks in forms)
        if self.front.rows and seconds > self.slowest * self.front.rows[0].seconds:
            return seconds, 0.0, 0.0
        enters = self.best.may_enter(mesh_key(parallel), seconds, 0)
        most = self.capacity + 1 if enters else min(self.capacity + 1, self.front.least_peak(seconds))
        layers = staged.partition.counts[0]
        kept = min(layers * blocks.layer.saved * staged.in_flight + (blocks.head.logits if parallel.pp == 1 else 0) for blocks in forms)
        return seconds, kept, most - kept

    def _search_engines(
        self, parallel: Parallel, row: PassChoice, state: StateChoice, staged: StagedSchedule, seconds: float, kept: float, micros: int
    ) -> None:
        """Cost a layout with each engine that trains it, unless the first layout of the mesh with the same states shows that it does not
        matter."""
        pipeline = staged.pipeline
        for engine in self._engines(parallel, state, pipeline):
            key = (state, engine, micros > 1, staged.partition.kinds, staged.partition.is_folded)
            known = self._least_states.get(key)
            if known and not self._may_matter(parallel, seconds + known.least_seconds(micros), known.fixed + max(kept, known.step)):
                continue
            layout = self.space.layout(parallel, row, state, pipeline)
            self._least_states[key] = self._cost(Candidate(layout, row.microbatch, engine), seconds)

    def _engines(self, parallel: Parallel, state: StateChoice, pipeline: ScheduleChoice) -> tuple[str | None, ...]:
        key = (state, pipeline.schedule, parallel.sequence)
        found = self._engines_of.get(key)
        if found is None:
            layout = self.space.layout(parallel, PassChoice(1, parallel.sequence, "none"), state, pipeline)
            found = self._engines_of[key] = self.space.engines(layout)
        return found

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
        first = kinds[layout.partition.kind_of_stage[0]]
        return LeastStates(
            fixed=first.weights + first.gradients + first.optimizer + first.overhead,
            step=first.step_bytes,
            seconds=max(kind.step + CONTENTION * sum([row.seconds for row in kind.data]) for kind in kinds) * (1 - ROUNDING),
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
