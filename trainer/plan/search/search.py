"""The search: every legal layout is costed, or left out because a lower bound shows that it can't be among the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf
from typing import NamedTuple

from ...spec.run import Parallel
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
from .space import Candidate, Space, StateChoice

SLOWEST = 1.25  # times the fastest layout's seconds: slower ones, which waste more than a fifth of the cluster, are not kept


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search: the best layout of each of the best meshes, the front of time against memory, the sizes of the space."""

    best: tuple[CostedLayout, ...]
    front: tuple[CostedLayout, ...]
    legal: int  # layouts
    costed: int  # of them; the others were discarded by bounds


class Pass(NamedTuple):
    """One kind of pass of a mesh: its degrees with sequence parallelism and recomputation, the sequences of a micro-batch, the
    micro-batches of a step, the schedules."""

    parallel: Parallel
    microbatch: int
    micros: int
    pipelines: list[StagedSchedule]


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


def candidate_layout(context: CostContext, candidate: Candidate) -> Layout:
    """The layout that a candidate names, costed as its engine, or without one as the papers do."""
    parallel, microbatch, engine = candidate
    return layout_on(ENGINES[engine] if engine else None, context, parallel, microbatch)


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
        self._least_states = {}
        self._least_fixed = {each: self.bounds.fixed_bytes(replace(parallel, zero=each.zero, offload=each.offload)) for each in states}
        fixed = min(self._least_fixed.values())
        passes = [(self.bounds.seconds(each.parallel), each) for each in self.passes(parallel)]
        for seconds, each in sorted(passes, key=lambda row: row[0]):
            if self._may_matter(each.parallel, seconds if timed else inf, fixed + self.least_kept(each)):
                self._search_pass(each, states, timed)

    def _is_timed(self, state: StateChoice) -> bool:
        """Whether the seconds of such layouts are known."""
        return self.context.rates is not None and not (state.offload.optimizer or state.offload.parameters)

    def passes(self, parallel: Parallel) -> Iterator[Pass]:
        """The passes of a mesh."""
        assert parallel.dp != "auto"
        splits: dict[tuple[bool, str], Parallel] = {}
        for row in self.space.passes(parallel):
            key, micros = (row.sequence, row.recompute), self.run.train.batch // (parallel.dp * row.microbatch)
            if key not in splits:
                splits[key] = replace(parallel, sequence=row.sequence, recompute=row.recompute)
            yield Pass(splits[key], row.microbatch, micros, self._on_stages(parallel, row.microbatch, micros))

    def _on_stages(self, parallel: Parallel, microbatch: int, micros: int) -> list[StagedSchedule]:
        """The schedules of a mesh with so many micro-batches."""
        found = self._staged.get((parallel.pp, micros))
        if found is None:
            pipelines = self.space.pipelines(parallel, microbatch)
            found = self._staged[parallel.pp, micros] = [staged_schedule(self.context, parallel, each, micros) for each in pipelines]
        return found

    def least_kept(self, each: Pass) -> float:
        """The least bytes of activations on the first stage, under any schedule of a pass."""
        held = min([staged.partition.counts[0] * staged.in_flight for staged in each.pipelines], default=inf)
        return each.microbatch * held * self.bounds.split(each.parallel).saved * (1 - ROUNDING)

    def _search_pass(self, each: Pass, states: list[StateChoice], timed: bool) -> None:
        """Cost the layouts of one kind of pass."""
        allowances_of: dict[frozenset[Form], list[Allowance]] = {}
        for zero, some in groupby(states, key=lambda state: state.zero):
            forms = self.bounds.forms(zero)
            if forms not in allowances_of:
                allowances_of[forms] = self.allowances(each, forms, timed)
            allowances = allowances_of[forms]
            most = max([allowed.bytes for allowed in allowances], default=0.0)
            for state in some:
                fixed = self._least_fixed[state]
                if fixed < most:
                    for allowed in allowances:
                        if fixed < allowed.bytes:
                            self._search_engines(each, state, allowed)

    def allowances(self, each: Pass, forms: frozenset[Form], timed: bool) -> list[Allowance]:
        """What layouts may hold under each schedule of a pass; a schedule under which none can matter is left out."""
        parallel, wires = each.parallel, self.context.wires(mesh_of(each.parallel, self.context.world))
        blocks = [self.context.block_costs(block_split(parallel, each.microbatch, form, fused=fused), wires) for form, fused in forms]
        send = hop_seconds(replace(parallel, schedule="1f1b", chunks=1), wires, blocks[0])
        compute = [pass_seconds(form) for form in blocks]
        saved = min([form.layer.saved for form in blocks])
        logits = min([form.head.logits for form in blocks]) if parallel.pp == 1 else 0
        temporary: dict[StageKind, int] = {}
        found: list[Allowance] = []
        for staged in each.pipelines:
            seconds = inf
            if timed:
                least = min([staged.least_seconds(form, send) for form in compute])
                seconds = least * (1 + self.context.tail) + self.context.step_overhead
                if self.front.rows and seconds > self.slowest * self.front.rows[0].seconds:
                    continue
            kind = staged.partition.kinds[0]
            if kind not in temporary:
                temporary[kind] = min([passes_bytes(self.context, form, kind) for form in blocks]) if self.space.runnable else 0
            kept = kind.layers * saved * staged.in_flight + logits + temporary[kind]
            enters = self.best.may_enter(mesh_key(parallel), seconds, 0)
            most = self.capacity + 1 if enters else min(self.capacity + 1, self.front.least_peak(seconds))
            if most > kept:
                found.append(Allowance(staged, seconds, kept, most - kept))
        return found

    def _search_engines(self, each: Pass, state: StateChoice, allowed: Allowance) -> None:
        """Cost a layout with each engine that trains it, unless the first layout of the mesh with the same states shows that it does not
        matter."""
        staged = allowed.staged
        for engine in self.space.engines(each.parallel, state, staged.choice):
            key = (state, engine, each.micros > 1, staged.partition.kinds, staged.partition.is_folded)
            known = self._least_states.get(key)
            if known:
                seconds = allowed.seconds + known.least_seconds(each.micros)
                if not self._may_matter(each.parallel, seconds, known.fixed + max(allowed.kept, known.step)):
                    continue
            layout = self.space.layout(each.parallel, state, staged.choice)
            self._least_states[key] = self._cost(Candidate(layout, each.microbatch, engine), allowed.seconds)

    def _cost(self, candidate: Candidate, seconds: float) -> LeastStates:
        """Cost one layout, as far as its figures may matter: its bytes, a bound of its seconds, its seconds."""
        layout = candidate_layout(self.context, candidate)
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
