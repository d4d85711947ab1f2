"""The search: every legal layout is costed, or left out because a lower bound shows that it can't be among the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf
from typing import NamedTuple

from ...spec.run import Parallel
from ..costs.block_costs import BlockCosts
from ..costs.cost_context import CostContext
from ..costs.local_tensors import block_split
from ..costs.stage_temporary_bytes import stage_temporary_bytes as passes_bytes
from ..engines import ENGINES
from ..layout.layout import Layout, StageKind, mesh_of
from ..layout_cost import has_times, hop_seconds, layout_blocks, peak_bytes, stage_costs, step_seconds
from ..layout_of_run import layout_on
from ..stage_cost import StageCost
from .bounds import ROUNDING, Bounds, Form, StagedSchedule, pass_seconds, staged_schedule
from .front import Best, CostedLayout, Front, mesh_key
from .space import Candidate, ScheduleChoice, Space, StateChoice
from .state_bounds import LeastStates, least_states

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


class StateRow(NamedTuple):
    """The states of a mesh: the least bytes that they hold, and a number that states on the same wires share."""

    state: StateChoice
    fixed: float
    number: int


class Allowance(NamedTuple):
    """A schedule of a pass: the least `seconds` of a step; `kept`, the least bytes of activations on the first stage; `bytes`, the most
    that states may add while a layout can still be among the best or on the front; `blocks` with as many elements as a layout's."""

    staged: StagedSchedule
    seconds: float
    kept: float
    bytes: float
    blocks: BlockCosts


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
        self._least_states: dict[tuple[object, ...], dict[tuple[int, str | None, int], LeastStates]] = {}
        self._staged: dict[tuple[int, int], list[StagedSchedule]] = {}  # of so many stages and micro-batches
        self._seconds: dict[tuple[object, ...], float] = {}
        self._shapes: dict[object, int] = {}  # numbers of the states of stages
        self._numbers: dict[object, int] = {}  # of states
        self._rows: list[StateRow] = []  # of one mesh
        self._engines: dict[tuple[bool, str], list[tuple[str | None, ...]]] = {}  # of the rows of one mesh
        self._place: tuple[object, ...] = ()
        self._without_sequence = space.run.parallel

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
        self._engines, self._rows = {}, [self._state_row(parallel, each) for each in states]
        wires = self.context.wires(mesh_of(parallel, self.context.world))
        self._without_sequence = replace(parallel, sequence=False)
        self._place = (parallel.tp, parallel.ep, wires.data, wires.expert_copies)
        fixed = min([row.fixed for row in self._rows])
        passes = [(self._least_seconds(each.parallel), each) for each in self.passes(parallel)]
        for seconds, each in sorted(passes, key=lambda row: row[0]):
            if self._may_matter(each.parallel, seconds if timed else inf, fixed + self.least_kept(each)):
                self._search_pass(each, seconds, timed)

    def _least_seconds(self, parallel: Parallel) -> float:
        """The least seconds of a mesh's passes with these splits of blocks."""
        key = (parallel.tp, parallel.pp, parallel.cp, parallel.ep, parallel.sequence, parallel.recompute)
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds[key] = self.bounds.seconds(parallel)
        return found

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
            found = self._staged[parallel.pp, micros] = [
                staged_schedule(self.context, parallel, each, micros, self._shapes) for each in pipelines
            ]
        return found

    def least_kept(self, each: Pass) -> float:
        """The least bytes of activations on the first stage, under any schedule of a pass."""
        return each.microbatch * self._held(each) * self.bounds.split(each.parallel).saved * (1 - ROUNDING)

    @staticmethod
    def _held(each: Pass) -> float:
        """The fewest layers' activations of a micro-batch that the first stage holds at once, under any schedule of a pass."""
        return min([staged.partition.counts[0] * staged.in_flight for staged in each.pipelines], default=inf)

    def _state_row(self, parallel: Parallel, state: StateChoice) -> StateRow:
        zero, shard, offload = state
        fixed = self.bounds.fixed_bytes(parallel, zero, offload)
        key = (zero, shard, offload.optimizer, offload.parameters, 0 if shard == "all" else parallel.cp)
        return StateRow(state, fixed, self._numbers.setdefault(key, len(self._numbers)))

    def _engines_of(self, each: Pass, schedule: ScheduleChoice) -> list[tuple[str | None, ...]]:
        """The engines of each of a mesh's rows."""
        key = (each.parallel.sequence, schedule.schedule)
        found = self._engines.get(key)
        if found is None:
            found = self._engines[key] = [self.space.engines(each.parallel, row.state, schedule) for row in self._rows]
        return found

    def _search_pass(self, each: Pass, seconds: float, timed: bool) -> None:
        """Cost the layouts of one kind of pass, a step of which takes at least so many seconds."""
        kept = self.least_kept(each)
        allowances_of: dict[frozenset[Form], list[Allowance]] = {}
        known = self._least_states.setdefault((*self._place, each.micros > 1), {})
        for zero, some in groupby(enumerate(self._rows), key=lambda row: row[1].state.zero):
            forms = self.bounds.forms(zero)
            if forms not in allowances_of:
                fixed = min([row.fixed for row in self._rows if self.bounds.forms(row.state.zero) == forms])
                may_matter = self._may_matter(each.parallel, seconds if timed else inf, fixed + kept)
                allowances_of[forms] = self.allowances(each, forms, timed, fixed) if may_matter else []
            allowances = allowances_of[forms]
            if not allowances:
                continue
            most = max([allowed.bytes for allowed in allowances])
            least = allowances[0]._replace(
                seconds=min([allowed.seconds for allowed in allowances]), kept=min([allowed.kept for allowed in allowances])
            )
            engines_of = [self._engines_of(each, allowed.staged.choice) for allowed in allowances]
            for at, row in some:
                if row.fixed >= most:
                    continue
                matters: dict[tuple[int, str | None, int], bool] = {}  # whether a layout may, with the least of all schedules
                for allowed, engines in zip(allowances, engines_of, strict=True):
                    if row.fixed < allowed.bytes:
                        for engine in engines[at]:
                            key = (row.number, engine, allowed.staged.shape)
                            if key not in known:
                                known[key] = self._least_states_of(each, row.state, allowed, engine)
                            if key not in matters:
                                matters[key] = self._states_may_matter(each, least, known[key])
                            if matters[key] and self._states_may_matter(each, allowed, known[key]):
                                self._cost(each, row.state, allowed, engine, known[key])

    def allowances(self, each: Pass, forms: frozenset[Form], timed: bool, fixed: float) -> list[Allowance]:
        """What layouts may hold under each schedule of a pass, whose states hold at least `fixed` bytes; a schedule under which none can
        matter is left out."""
        parallel, wires = each.parallel, self.context.wires(mesh_of(each.parallel, self.context.world))
        blocks = [self.context.block_costs(block_split(parallel, each.microbatch, form, fused=fused), wires) for form, fused in forms]
        compute = [pass_seconds(form) for form in blocks]
        saved = min([form.layer.saved for form in blocks])
        step = min([self.bounds.pass_seconds(parallel.pp, each.micros, form) for form in compute]) if timed else inf
        if not self._may_matter(parallel, step, fixed + self._held(each) * saved):
            return []
        send = hop_seconds(replace(parallel, schedule="1f1b", chunks=1), wires, blocks[0])
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
                found.append(Allowance(staged, seconds, kept, most - kept, blocks[0]))
        return found

    def _states_may_matter(self, each: Pass, allowed: Allowance, states: LeastStates) -> bool:
        return self._may_matter(each.parallel, allowed.seconds + states.seconds(each.micros), states.bytes(allowed.kept))

    def _least_states_of(self, each: Pass, state: StateChoice, allowed: Allowance, engine: str | None) -> LeastStates:
        """What the states of a layout cost at least, with sequence parallelism or without it: it adds sums of gradients."""
        whole = each._replace(parallel=self._without_sequence)
        return least_states(self.context, self._layout(whole, state, allowed, engine)[1], allowed.blocks)

    def _cost(self, each: Pass, state: StateChoice, allowed: Allowance, engine: str | None, least: LeastStates) -> None:
        """Cost one layout, as far as its figures may matter: its bytes, a bound of its seconds, its seconds."""
        candidate, layout = self._layout(each, state, allowed, engine)
        blocks = layout_blocks(self.context, layout)
        kinds = stage_costs(self.context, layout, blocks)
        self.costed += 1
        peak, _ = peak_bytes(layout, kinds)
        if self._may_matter(candidate.parallel, allowed.seconds + least.seconds(each.micros), peak):
            self._add(candidate, layout, blocks, kinds, peak)

    def _layout(self, each: Pass, state: StateChoice, allowed: Allowance, engine: str | None) -> tuple[Candidate, Layout]:
        candidate = Candidate(self.space.layout(each.parallel, state, allowed.staged.choice), each.microbatch, engine)
        return candidate, candidate_layout(self.context, candidate)

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
