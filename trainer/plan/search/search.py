"""The search: every legal layout is costed, or left out because a lower bound shows that it can't be among the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from ...spec.run import Offload, Parallel, Run
from ..costs.block_costs import BlockCosts
from ..costs.cost_context import CostContext
from ..costs.local_tensors import block_split
from ..engines import ENGINES, cost_model
from ..layout.gradient_routes import inner_ranks
from ..layout.layout import Layout, mesh_of
from ..layout.workers import worker_ranks
from ..layout_cost import fits, has_times, layout_blocks, peak_bytes, step_seconds
from ..layout_of_run import layout_on
from ..stage_cost import stage_costs
from .garbage_collection import pause_garbage_collection
from .kept_layouts import Best, CostedLayout, Front, MeshKey, mesh_key
from .layout_bounds import Bounds
from .layout_kinds import LayoutKind, layout_kinds
from .pass_table import Pass, PassTable
from .run_seconds import ranked_seconds, share_of_several
from .space import Candidate, Space, StateChoice, Zero
from .state_bounds import LeastBytes, LeastSeconds, least_bytes, least_seconds

NO_MESH = (0, 0, 0, 0)
SLOWEST = 1.25  # times the fastest layout's seconds: slower ones, which waste more than a fifth of the cluster, are not kept


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search: the best layout of each of the best meshes, the front of time against memory, the sizes of the space; the
    context in which each kind of layouts was costed."""

    best: tuple[CostedLayout, ...]
    front: tuple[CostedLayout, ...]
    legal: int  # layouts
    costed: int  # of them; the others were discarded by bounds
    contexts: tuple[tuple[LayoutKind, CostContext], ...]

    def context_of(self, candidate: Candidate) -> CostContext:
        """The context in which a candidate was costed."""
        return next(context for kind, context in self.contexts if kind.holds(candidate))


def search_layouts(
    run: Run, fixed: frozenset[str] = frozenset(), *, rows: int, by_memory: bool = False, known: CostedLayout | None = None
) -> SearchResult:
    """Search the layouts of a run, as its `search` section says; keys in `fixed` stay as the run has them. Layouts whose ranks share
    sequences are searched with both ways of parallel.cp_comm, layouts of GPUs with compiled layers and without. `known`: a layout that
    others have to beat."""
    settings, searches, found = run.search, list[LayoutSearch](), list[SearchResult]()
    kinds = layout_kinds(run, fixed)
    for kind in kinds:
        space = Space(kind.run, fixed, runnable=settings.runnable or kind.runnable, shares=kind.shares, zeros=kind.zeros)
        after = searches[-1] if searches else None
        searches.append(LayoutSearch(space, rows=rows, by_memory=by_memory, headroom=settings.headroom, after=after))
        if known is not None and after is None:
            searches[0].best.add(NO_MESH, known)
            searches[0].front.add(known)
        found.append(searches[-1].run_all())
    return replace(
        found[-1],
        legal=sum([each.legal for each in found]),
        costed=sum([each.costed for each in found]),
        contexts=tuple([(kind, each.context) for kind, each in zip(kinds, searches, strict=True)]),
    )


class StateRow(NamedTuple):
    """The states of a mesh: the least bytes that they hold, and a number that states on the same wires share."""

    state: StateChoice
    fixed: float
    number: int


@dataclass(slots=True)
class EngineStates:
    """The states of a mesh on an engine, under schedules of one shape: what they cost at least, once that is known."""

    row: StateRow
    engine: str | None
    simulates: bool  # uneven steps
    bytes: LeastBytes | None = None
    seconds: LeastSeconds | None = None


class MeshStates(NamedTuple):
    """The states of a mesh, and what decides their bounds beside the states themselves."""

    rows: list[StateRow]
    ranks: tuple[int, ...]  # tensor-parallel, expert and data ranks
    place: tuple[object, ...]  # those ranks on their wires
    parallel: Parallel  # without sequence parallelism, which adds sums of gradients
    on_engines: dict[tuple[object, ...], list[EngineStates]]  # by what decides the engines, and which bounds hold


def candidate_layout(context: CostContext, candidate: Candidate) -> Layout:
    """The layout that a candidate names, costed as its engine, or without one as the papers do."""
    parallel, microbatch, engine, _ = candidate
    return layout_on(ENGINES[engine] if engine else None, context, parallel, microbatch)


class LayoutSearch:
    """One search over a space."""

    def __init__(
        self, space: Space, *, rows: int, by_memory: bool = False, headroom: float = 0.0, after: LayoutSearch | None = None
    ) -> None:
        """`rows`: the meshes to find; `headroom`: the share of a rank's memory that a layout leaves free. `after`: a search of other
        layouts, whose finds this one keeps or beats."""
        self.space, self.run = space, space.run
        self.context = CostContext(space.run)
        self.capacity = int(self.context.capacity * (1 - headroom))
        self.bounds = Bounds(self.context, runnable=space.runnable)
        self.best: Best = after.best if after else Best(rows, by_memory=by_memory)
        self.front: Front = after.front if after else Front()
        self.slowest = inf if by_memory else SLOWEST
        self.costed = 0
        self._least_bytes: dict[tuple[object, ...], LeastBytes] = {}
        self._least_seconds: dict[tuple[object, ...], LeastSeconds] = {}
        self._numbers: dict[object, int] = {}  # of states

    def run_all(self) -> SearchResult:
        """Search the whole space, passes with the least bound first; layouts whose time is not known come last."""
        with pause_garbage_collection():  # costs and bounds stay until the end: looking through them takes a seventh of the time
            table = PassTable(self.space, self.context, self.bounds)
            for timed in (True, False):
                self._search(table, timed=timed)
        return SearchResult(
            best=tuple(self._in_time(self.best.best_layouts())),
            front=tuple(self._in_time(self.front.rows)),
            legal=sum(map(self.space.size, table.meshes)),
            costed=self.costed,
            contexts=(),
        )

    def _search(self, table: PassTable, *, timed: bool) -> None:
        """Search the layouts whose seconds are known, or the others."""
        if (timed and self.context.rates is None) or (not timed and self._is_too_slow(inf)):
            return
        offload = Offload() if timed and self.context.host_rates is None else Offload(optimizer=True, parameters=True)
        known: dict[int, MeshStates] = {}
        keys = list(map(mesh_key, table.meshes))
        by_seconds = timed and not self.best.by_memory
        for bound in table.bounds_in_order(offload, self.capacity, by_seconds=by_seconds, timed=timed):
            if by_seconds and self._is_too_slow(bound.seconds):
                return
            if self._may_matter(keys[bound.mesh], bound.seconds, bound.peak):
                each = table.pass_of(bound)
                if each.mesh not in known:
                    known[each.mesh] = self._mesh_states(table.meshes[each.mesh], table.end_layers[each.mesh], timed=timed)
                self._search_pass(each, known[each.mesh], table.forms[each.forms])

    def _in_time(self, rows: list[CostedLayout]) -> Iterator[CostedLayout]:
        return (row for row in rows if not self._is_too_slow(row.seconds))

    def _mesh_states(self, parallel: Parallel, layers: int, *, timed: bool) -> MeshStates:
        states = [each for each in self.space.states(parallel) if self._is_timed(each) == timed]
        wires = self.context.wires(mesh_of(parallel, self.context.world))
        ranks = (parallel.tp, parallel.ep, wires.data.size)
        place = (*ranks, wires.data, wires.expert_copies)
        return MeshStates([self._state_row(parallel, layers, each) for each in states], ranks, place, replace(parallel, sequence=False), {})

    def _is_timed(self, state: StateChoice) -> bool:
        """Whether the seconds of such layouts are known."""
        return self.context.rates is not None and (self.context.host_rates is not None or not state.offload.names)

    def _state_row(self, parallel: Parallel, layers: int, state: StateChoice) -> StateRow:
        zero, shard, offload = state
        fixed = self.bounds.fixed_bytes(layers, parallel.tp, parallel.pp, parallel.ep, zero, offload)
        key = (zero, shard, offload.optimizer, offload.parameters)
        return StateRow(state, fixed, self._numbers.setdefault(key, len(self._numbers)))

    def _on_engines(self, each: Pass, states: MeshStates) -> list[EngineStates]:
        """The states of a mesh on each engine that trains them under a schedule."""
        choice = each.staged.choice
        key = (each.parallel.sequence, choice.schedule, each.micros > 1, each.staged.shape)
        found = states.on_engines.get(key)
        if found is None:
            found = states.on_engines[key] = [
                EngineStates(row, engine, cost_model(engine).simulates_uneven)
                for row in states.rows
                for engine in self.space.engines(each.parallel, row.state, choice)
            ]
        return found

    def _search_pass(self, each: Pass, states: MeshStates, zeros: set[Zero]) -> None:
        """Cost the layouts of a pass at some ZeRO stages."""
        mesh, kept = mesh_key(each.parallel), max(each.kept)
        most: float = self.capacity + 1
        if not self.best.may_enter(mesh, min(each.seconds), 0):
            most = min(most, self.front.least_peak(min(each.seconds)))
        for known in self._on_engines(each, states):
            row, engine = known.row, known.engine
            if row.fixed + kept >= most or row.state.zero not in zeros:
                continue
            least = known.bytes
            if least is None:
                least = known.bytes = self._bytes_of(each, states, row, engine)
            seconds, peak = each.seconds[known.simulates], least.bytes(each.kept)
            share = self._share_of_several(each)
            if self._may_matter(mesh, seconds, peak):
                added = known.seconds
                if added is None:
                    added = known.seconds = self._seconds_of(each, states, row, engine)
                if self._may_matter(mesh, seconds + share * added.seconds(each.micros), peak):
                    self._cost(each, row.state, engine)

    def _bytes_of(self, each: Pass, states: MeshStates, row: StateRow, engine: str | None) -> LeastBytes:
        """The least bytes of states, whatever the passes are."""
        key = (states.ranks, self._workers(states.parallel), each.micros > 1, row.number, engine, each.staged.shape)
        found = self._least_bytes.get(key)
        if found is None:
            found = self._least_bytes[key] = least_bytes(self.context, *self._plain_pass(each, states, row.state, engine))
        return found

    def _seconds_of(self, each: Pass, states: MeshStates, row: StateRow, engine: str | None) -> LeastSeconds:
        """The least seconds of states, whatever the passes are."""
        copies = row.state.shard == "all" or states.parallel.cp  # decides where the owners of the same shard are
        key = (states.place, copies, self._workers(states.parallel), each.micros > 1, row.number, engine, each.staged.shape)
        found = self._least_seconds.get(key)
        if found is None:
            found = self._least_seconds[key] = least_seconds(self.context, *self._plain_pass(each, states, row.state, engine))
        return found

    def _workers(self, parallel: Parallel) -> tuple[int, int, int] | None:
        """The ranks of the data axis that sum gradients together: the ranks of a worker, those that share a sequence, those that sum
        before the nodes do; None: all at once."""
        mesh, gpus = mesh_of(parallel, self.context.world), self.context.run.cluster.gpus
        if parallel.sync.every == 1 and parallel.reduce != "hierarchical":
            return None
        return worker_ranks(parallel, mesh, gpus), parallel.cp, inner_ranks(parallel, mesh, gpus)

    def _plain_pass(self, each: Pass, states: MeshStates, state: StateChoice, engine: str | None) -> tuple[Layout, BlockCosts]:
        """A layout with these states, and the costs of its blocks with one sequence in a micro-batch."""
        parallel = states.parallel
        layout, hides = self._layout(each._replace(parallel=parallel), state, engine)[1], cost_model(engine).hides_messages
        return layout, self.context.block_costs(
            block_split(parallel, 1, layout.form, fused=layout.fused, hides_messages=hides), layout.wires
        )

    def _cost(self, each: Pass, state: StateChoice, engine: str | None) -> None:
        """Cost one layout, its seconds last: its bytes and its states may show that it does not matter."""
        candidate, layout = self._layout(each, state, engine)
        blocks = layout_blocks(self.context, layout)
        kinds = stage_costs(self.context, layout, blocks, layout.partition.kinds)
        self.costed += 1
        peak, _, host = peak_bytes(self.context, layout, kinds)
        if not fits(self.context, peak, host):
            return
        added, mesh = max([kind.exposed + kind.step for kind in kinds]), mesh_key(each.parallel)
        if self._may_matter(mesh, each.seconds_on(engine) + self._share_of_several(each) * added, peak):
            timed = has_times(self.context, layout)
            step = step_seconds(self.context, layout, blocks, kinds).step if timed else inf
            found = CostedLayout(ranked_seconds(self.context, layout, step) if timed else inf, peak, candidate)
            self.best.add(mesh, found)
            self.front.add(found)

    def _layout(self, each: Pass, state: StateChoice, engine: str | None) -> tuple[Candidate, Layout]:
        candidate = Candidate(self.space.layout(each.parallel, state, each.staged.choice), each.microbatch, engine, self.run.train.compile)
        return candidate, candidate_layout(self.context, candidate)

    def _share_of_several(self, each: Pass) -> float:
        """The share of the run's samples for which a bound of what states cost beside these passes holds."""
        parallel = each.parallel
        assert parallel.dp != "auto"
        return share_of_several(self.run.train, parallel.dp * each.microbatch)

    def _is_too_slow(self, seconds: float) -> bool:
        return seconds > self.slowest * self.front.fastest

    def _may_matter(self, mesh: MeshKey, seconds: float, peak: float) -> bool:
        """Whether a layout with at least these seconds and bytes may fit and be among the best, or on the front."""
        if peak > self.capacity or self._is_too_slow(seconds):
            return False
        return not self.front.beats(seconds, peak) or self.best.may_enter(mesh, seconds, peak)
