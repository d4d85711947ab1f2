"""The stage boundaries of a layout with which its step is fastest, embedding, head and memory of each stage counted.

Alpa's inter-operator pass (arXiv:2201.12023 section 5) minimises the sum of the stages and m - 1 times the slowest one. A step of uneven
stages is simulated here: it takes as long as the longest path through its actions, and each path is linear in the layers of the stages.
So a dynamic programme over (stage, layers left) gives, for each path that is known, the least seconds of any way to go on; a partition
whose bounds are below the best known is timed, which makes its own longest path known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from typing import NamedTuple

from ..costs.block_costs import BlockCosts
from ..costs.cost_context import CostContext
from ..layout.layout import Layout, StageKind, layer_partition
from ..layout_cost import hop_seconds, layout_cost, stage_bytes, tied_seconds
from ..replica_wait import replica_wait_seconds
from ..stage_cost import StageCost, stage_costs
from .path_bounds import PathBounds, combined_path, least_layers, stage_limits
from .step_paths import Path, StepPaths

ROUNDING = 1e-9  # relative: a gain that is smaller is none
MOST_VISITED = 3000  # beginnings of partitions that a search goes on from; beyond, the best one is not proven
MOST_MEANS = 12  # of paths
MOST_TIMED = 400  # partitions of a layout that are timed


class BestStages(NamedTuple):
    """The fastest layers of each part that were found (None: none is faster than asked), the seconds of a step, and those that no
    partition is below: the same where the search was complete."""

    stages: tuple[int, ...] | None
    seconds: float
    least: float


def with_stages(layout: Layout, stages: tuple[int, ...]) -> Layout:
    """A layout whose parts have these layers; the first one has the dense layers of the layout besides."""
    partition = layer_partition(stages, chunks=layout.chunks, folded=layout.is_folded, dense_layers=layout.partition.dense_layers)
    return layout._replace(parallel=replace(layout.parallel, stages=partition.whole_parts), partition=partition)


def best_stages(context: CostContext, layout: Layout, blocks: BlockCosts, capacity: int, *, below: float = inf) -> BestStages:
    """The layers of each part with which a layout of several stages fits and its step takes least, if that is less than `below` seconds."""
    found = _StageSearch(context, layout, blocks, capacity, StepPaths(layout, blocks)).run(below)
    if found.stages is None:
        return found
    cost = layout_cost(context, with_stages(layout, found.stages))
    assert cost.seconds
    seconds = cost.seconds.step
    return BestStages(found.stages, seconds, min(found.least, seconds))


class _StageSearch:
    """One search over the partitions of a layout; a partition is written by position (path_bounds.py), not by part."""

    def __init__(self, context: CostContext, layout: Layout, blocks: BlockCosts, capacity: int, paths: StepPaths) -> None:
        self.context, self.layout, self.capacity, self.paths = context, layout, capacity, paths
        self.layers, self.stages, self.chunks = context.layers, layout.mesh.pp, layout.chunks
        self.order = [part for stage in range(self.stages) for part in layout.parts(stage)]  # the part of each position
        self.head_stage = 0 if layout.is_folded else self.stages - 1
        self.fixed = (layout.micros * hop_seconds(layout, blocks) + tied_seconds(context, layout, blocks)) * (1 + context.tail)
        self.cost: Callable[[int, bool, bool], StageCost] = cache(
            lambda *kind: stage_costs(context, layout, blocks, (StageKind(*kind),))[0]
        )
        wait = replica_wait_seconds(context, layout, blocks, self.cost(self.chunks, True, False).messages)
        self.fixed += wait * (1 + context.tail) + context.step_overhead
        self.best: tuple[int, ...] | None = None
        self.limit = inf  # seconds
        self.timed = self.visited = 0
        self.limits = stage_limits([self.layers - (self.stages - 1) * self.chunks] * self.stages, self.chunks, self.layers)
        self.bounds = PathBounds(self.limits)
        self.known = 0  # paths that have a bound
        self.least_exposed = 0.0  # seconds

    def run(self, below: float) -> BestStages:
        """Search for a partition with fewer seconds than `below`."""
        self.limit = below
        self._lower_limits()
        if not self.limits.admit_any():
            return BestStages(None, below, below)
        self._descend(self._balanced_layers())
        self._lower_limits()
        if not self.limits.admit_any():
            return BestStages(self._by_part(), self.limit, self.limit)
        state, exposed = self._least_state_seconds()
        self.least_exposed = self.context.tail * exposed
        self.bounds = PathBounds(self.limits)
        self._learn()
        self._combine(state)
        least = self._step_bound(max(self.bounds.leasts), state)
        is_complete = self._visit(self.layers, state)
        return BestStages(self._by_part(), self.limit, self.limit if is_complete else min(least, self.limit))

    def _by_part(self) -> tuple[int, ...] | None:
        """The best partition, its parts in the order of the model."""
        return self._parts(self.best) if self.best else None

    def _parts(self, layers: Sequence[int]) -> tuple[int, ...]:
        return tuple([many for _, many in sorted(zip(self.order, layers, strict=True))])

    def _stage_cost(self, stage: int, layers: int) -> StageCost:
        return self.cost(layers, stage == 0, stage == self.head_stage)

    def _fits(self, stage: int, layers: int) -> bool:
        return stage_bytes(self.layout, self._stage_cost(stage, layers), stage) <= self.capacity

    def _state_seconds(self, stage: int, layers: int) -> tuple[float, float]:
        """(seconds of the data axis's exposed messages and the optimizer, of the former alone) of a stage."""
        cost = self._stage_cost(stage, layers)
        return cost.exposed + cost.step, cost.exposed

    def _lower_limits(self) -> None:
        """Lower each stage's most layers to what fits and to what its own work allows in the time of the best known."""
        found = []
        for stage, most in enumerate(self.limits.most):
            while most >= self.chunks and not (self._busy_seconds(stage, most) < self.limit and self._fits(stage, most)):
                most -= 1
            found.append(most)
        self.limits = stage_limits(found, self.chunks, self.layers)

    def _busy_seconds(self, stage: int, layers: int) -> float:
        """The least seconds of a step whose stage has these layers: its own work."""
        cost = self._stage_cost(stage, layers)
        return self.layout.micros * cost.passes.seconds * (1 + self.context.tail) * (1 - ROUNDING) + self.fixed

    def _least_state_seconds(self) -> tuple[float, float]:
        """The least of `_state_seconds` of any partition: the slowest stage's, and any stage's exposed messages."""
        ranges = [range(least, most + 1) for least, most in zip(self.limits.least, self.limits.most, strict=True)]
        each = [[self._state_seconds(stage, layers) for layers in some] for stage, some in enumerate(ranges)]
        return max(min(both for both, _ in some) for some in each), min(exposed for some in each for _, exposed in some)

    def _balanced_layers(self) -> list[int]:
        """Layers one by one to the stage with the least to do that has room, there to the part with the fewest."""
        layers, held = [1] * len(self.order), [self.chunks] * self.stages
        for _ in range(self.layers - len(layers)):
            stages = [stage for stage in range(self.stages) if held[stage] < self.limits.most[stage]]
            stage = min(stages, key=lambda each: self._busy_seconds(each, held[each] + 1))
            first = stage * self.chunks
            layers[min(range(first, first + self.chunks), key=layers.__getitem__)] += 1
            held[stage] += 1
        return layers

    def _stage_layers(self, layers: Sequence[int]) -> list[int]:
        """The layers of each stage."""
        return [sum(layers[at : at + self.chunks]) for at in range(0, len(layers), self.chunks)]

    def _time(self, layers: Sequence[int]) -> float:
        """The seconds of a step, as the planner's `step_seconds` has them; the partition is kept if it is the best."""
        self.timed += 1
        held = self._stage_layers(layers)
        both, exposed = max((self._state_seconds(stage, many) for stage, many in enumerate(held)), key=lambda row: row[0])
        pipeline = self.paths.step_seconds(self._parts(layers))
        seconds = pipeline * (1 + self.context.tail) + both + self.context.tail * exposed + self.fixed
        if seconds < self.limit * (1 - ROUNDING) and all(self._fits(stage, many) for stage, many in enumerate(held)):
            self.limit, self.best = seconds, tuple(layers)
        return seconds

    def _paths(self) -> list[Path]:
        """The paths that are known, by position."""
        return [path._replace(layer=tuple([path.layer[part] for part in self.order])) for path in self.paths.found_paths()]

    def _descend(self, layers: Sequence[int]) -> None:
        """Move a layer from part to part, as long as the known paths don't show that no move helps."""
        seconds = self._time(layers)
        while self.timed < MOST_TIMED // 4:
            known = self._paths()
            now = [path.seconds(layers) for path in known]
            bound, moved = self._best_move(layers, known, now)
            if bound >= max(now) * (1 - ROUNDING):
                return
            new = self._time(moved)
            if new < seconds:
                layers, seconds = moved, new

    def _best_move(self, layers: Sequence[int], known: Sequence[Path], now: Sequence[float]) -> tuple[float, list[int]]:
        """(the longest known path after the best move of one layer, the partition after it); `now` are the seconds of the paths."""
        import numpy as np

        moves = np.array(list(self._moves(layers)), dtype=int).reshape(-1, 2)
        if not len(moves):
            return inf, []
        source, target = moves.T
        each = np.array([path.layer for path in known])
        longest = (np.array(now)[:, None] - each[:, source] + each[:, target]).max(axis=0)
        best, moved = int(longest.argmin()), list(layers)
        moved[source[best]] -= 1
        moved[target[best]] += 1
        return float(longest[best]), moved

    def _moves(self, layers: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield from which position to which other one a layer may move."""
        held, most = self._stage_layers(layers), self.limits.most
        for source, many in enumerate(layers):
            for target in range(len(layers)) if many > 1 else ():
                stage = target // self.chunks
                if source != target and (held[stage] < most[stage] or stage == source // self.chunks):
                    yield source, target

    def _learn(self) -> None:
        """Bound partitions by the paths that became known."""
        paths = self._paths()
        for path in paths[self.known :]:
            self.bounds.add(path)
        self.known = len(paths)

    def _combine(self, state: float) -> None:
        """Bound partitions by means of the known paths too; the partition that such a mean is shortest for shows a further path."""
        for _ in range(MOST_MEANS):
            paths = self._paths()
            mean = combined_path(paths, self.limits)
            self.bounds.add(mean)
            if self._step_bound(self.bounds.leasts[-1], state) >= self.limit * (1 - ROUNDING):
                return
            self._time(least_layers(mean, self.limits))
            if len(self.paths.found_paths()) == len(paths):
                return
            self._learn()

    def _visit(self, left: int, state: float) -> bool:
        """Time every partition that goes on from the one being made and whose bounds are below the best, the least bound first; `left`
        are the layers left, `state` is the most of the finished stages' seconds of states. Returns whether there was time for all."""
        made = self.bounds.made
        at = len(made)
        if at == len(self.order):
            self._time(made)
            self._learn()
            return self.timed < MOST_TIMED
        self.visited += 1
        stage, chunk = divmod(at, self.chunks)
        held = sum(made[at - chunk :])
        choices, known = self._choices(at, held, left), self.bounds.count
        longest = dict(zip(choices, self.bounds.longest(choices, held, left), strict=True))
        for many in sorted(choices, key=longest.__getitem__):
            if self.bounds.count > known:  # a way to go on made further paths known
                known, longest = self.bounds.count, dict(zip(choices, self.bounds.longest(choices, held, left), strict=True))
            after = state
            if chunk == self.chunks - 1:
                if not self._fits(stage, held + many):
                    continue
                after = max(state, self._state_seconds(stage, held + many)[0])
            if self._step_bound(longest[many], after) >= self.limit * (1 - ROUNDING):
                continue
            self.bounds.push(many)
            went_on = self._visit(left - many, after)
            self.bounds.pop()
            if not went_on or self.visited > MOST_VISITED:
                return False
        return True

    def _choices(self, at: int, held: int, left: int) -> range:
        """The layers that a position may have, where its stage has `held` before it."""
        stage, chunk = divmod(at, self.chunks)
        behind = self.chunks - 1 - chunk
        least = 1 if behind else max(1, self.limits.least[stage] - held)
        return range(least, min(self.limits.most[stage] - held - behind, left) + 1)

    def _step_bound(self, path: float, state: float) -> float:
        """The least seconds of a step with such a path and such a slowest stage's states."""
        return path * (1 + self.context.tail) + state + self.least_exposed + self.fixed
