"""The passes of every mesh of a space under every schedule, with lower bounds of what each costs: arrays with an element for each."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from math import inf
from typing import NamedTuple

from ...spec.changed_run import with_values
from ...spec.run import Offload, Parallel
from ..axes.collectives import collective_cost
from ..costs.block_costs import BlockCosts
from ..costs.cost_context import CostContext
from ..costs.local_tensors import BlockSplit, block_split
from ..engines import cost_model
from ..layout.layout import mesh_of
from ..layout.mesh import Wires
from .layout_bounds import Bounds
from .space import RECOMPUTES, ZEROS, Space, Zero
from .split_arrays import Array, Form, SplitOnWires, blocks_of_splits, map_fields, merged_wire
from .staged_schedules import StagedSchedule, pass_seconds, stacked_schedules, staged_schedule

AT_ONCE = 1 << 12  # passes whose bounds are computed, or read from the arrays: few enough that the arrays lie in the cache


class Pass(NamedTuple):
    """One kind of pass of a mesh under one schedule: its degrees with sequence parallelism and recomputation, the sequences of a
    micro-batch; the forms that its layers may have; the least seconds of a step, on engines whose uneven steps have a closed form and on
    those that simulate them, and the least bytes on the first and on the last stage, beside states."""

    mesh: int  # the number of the mesh
    parallel: Parallel
    microbatch: int
    staged: StagedSchedule
    forms: frozenset[Form]
    seconds: tuple[float, float]
    kept: tuple[float, float]

    @property
    def micros(self) -> int:
        """Micro-batches of a step."""
        return self.staged.micros

    def seconds_on(self, engine: str | None) -> float:
        """The least seconds of a step on an engine."""
        return self.seconds[cost_model(engine).simulates_uneven]


class PassBound(NamedTuple):
    """The least seconds and bytes of the layouts of a pass; where it stands in the table."""

    row: int
    mesh: int
    seconds: float
    peak: float


class PassColumns(NamedTuple):
    """The passes of all meshes, without their schedules."""

    mesh: Array
    sequence: Array
    recompute: Array  # its number in RECOMPUTES
    microbatch: Array
    split: Array  # its number among those with the same sequence parallelism
    schedule: Array  # the number of the first schedule
    schedules: Array  # how many there are


class PassTable:
    """All passes of a space."""

    def __init__(self, space: Space, context: CostContext, bounds: Bounds) -> None:
        import numpy as np

        self.space, self.context, self.bounds = space, context, bounds
        self.meshes = list(space.meshes())
        self.forms: dict[frozenset[Form], set[Zero]] = {}  # that layers may have, and at which ZeRO stages
        for zero in ZEROS:
            self.forms.setdefault(bounds.forms(zero), set()).add(zero)
        self._staged: list[StagedSchedule] = []
        self._splits: tuple[list[SplitOnWires], list[SplitOnWires]] = ([], [])  # without sequence parallelism and with it
        self._numbers: tuple[dict[tuple[object, ...], int], dict[tuple[object, ...], int]] = ({}, {})  # of those splits
        self._block_splits: dict[tuple[object, ...], BlockSplit] = {}
        self._wires = [context.wires(mesh_of(parallel, context.world)) for parallel in self.meshes]
        self._passes = self._every_pass()
        fewest: dict[int, int] = {}  # by stages
        for partition in {each.partition for each in self._staged}:
            ends, stages = (partition.counts[0], partition.counts[-1]), len(partition.counts)
            fewest[stages] = min(*ends, fewest.get(stages, space.run.model.layer_groups))
        self.end_layers = [fewest.get(each.pp, 0) for each in self.meshes]  # the fewest of the first or the last stage of each mesh
        self._parallel: dict[tuple[int, bool, int], Parallel] = {}
        counts = self._passes.schedules
        self._pass = np.repeat(np.arange(len(counts)), counts)  # of each row
        self._schedule = np.arange(len(self._pass)) + np.repeat(self._passes.schedule - np.cumsum(counts) + counts, counts)
        self._rows = len(self._pass)
        self._seconds, self._kept = self._least_costs()

    def bounds_in_order(self, offload: Offload, capacity: float, *, by_seconds: bool, timed: bool) -> Iterator[PassBound]:
        """Yield the bounds of passes that may fit into `capacity` bytes with states offloaded at most so, the least bounds first."""
        import numpy as np

        if not self._rows:
            return
        tp, pp, ep = (np.array([getattr(each, name) for each in self.meshes]) for name in ("tp", "pp", "ep"))
        layers = np.array(self.end_layers)
        fixed = np.stack([self.bounds.fixed_bytes(layers, tp, pp, ep, max(zeros), offload) for zeros in self.forms.values()])
        mesh = self._passes.mesh[self._pass]
        peak = (self._kept.max(axis=1) + fixed[:, mesh]).ravel()
        seconds = self._seconds.min(axis=1).ravel()
        fits = np.flatnonzero(peak <= capacity)
        order = fits[np.argsort((seconds if by_seconds else peak)[fits], kind="stable")]
        meshes = mesh[order % self._rows]
        least = seconds[order] if timed else np.full(len(order), inf)
        for start in range(0, len(order), AT_ONCE):
            some = slice(start, start + AT_ONCE)
            yield from map(PassBound, *[column[some].tolist() for column in (order, meshes, least, peak[order])])

    def pass_of(self, bound: PassBound) -> Pass:
        """The pass that has a bound."""
        number, row = divmod(bound.row, self._rows)
        forms = list(self.forms)[number]
        first, last = self._kept[number, :, row].tolist()
        closed, simulated = self._seconds[number, :, row].tolist() if bound.seconds < inf else (inf, inf)
        at, passes = self._pass[row], self._passes
        mesh, sequence, recompute = int(passes.mesh[at]), bool(passes.sequence[at]), int(passes.recompute[at])
        parallel = self._parallel.get((mesh, sequence, recompute))
        if parallel is None:
            parallel = with_values(self.meshes[mesh], sequence=sequence, recompute=RECOMPUTES[recompute])
            self._parallel[mesh, sequence, recompute] = parallel
        return Pass(
            mesh, parallel, int(passes.microbatch[at]), self._staged[self._schedule[row]], forms, (closed, simulated), (first, last)
        )

    def _every_pass(self) -> PassColumns:
        import numpy as np

        numbers = {recompute: number for number, recompute in enumerate(RECOMPUTES)}
        staged: dict[tuple[int, int], tuple[int, int]] = {}
        shapes: dict[object, int] = {}
        rows: list[tuple[int, ...]] = []
        for mesh, (parallel, wires) in enumerate(zip(self.meshes, self._wires, strict=True)):
            assert parallel.dp != "auto"
            place = (parallel.tp, parallel.cp, parallel.ep, *[wire.in_node for wire in wires.axes.values()])
            split, found, before = 0, (0, 0), None
            for microbatch, sequence, recompute in self.space.passes(parallel):
                if (microbatch, sequence) != before:  # else only recomputation differs
                    before = microbatch, sequence
                    split = self._number_split(parallel, wires, place, microbatch, sequence)
                    micros = self.space.run.train.batch // (parallel.dp * microbatch)
                    known = staged.get((parallel.pp, micros))
                    if known is None:
                        known = staged[parallel.pp, micros] = self._stage(parallel, microbatch, micros, shapes)
                    found = known
                rows.append((mesh, sequence, numbers[recompute], microbatch, split, *found))
        return PassColumns(*np.array(rows, dtype=int).reshape(-1, len(PassColumns._fields)).T)

    def _number_split(self, parallel: Parallel, wires: Wires, place: tuple[int, ...], microbatch: int, sequence: bool) -> int:
        """The number of the split of a mesh's blocks among those with the same sequence parallelism; meshes at a `place` share it."""
        known = self._numbers[sequence]
        number = known.get((place, microbatch))
        if number is None:
            number = known[place, microbatch] = len(known)
            if (place, sequence) not in self._block_splits:
                self._block_splits[place, sequence] = block_split(with_values(parallel, sequence=sequence), 1, "torch", fused=False)
            self._splits[sequence].append(SplitOnWires(self._block_splits[place, sequence], wires, microbatch))
        return number

    def _stage(self, parallel: Parallel, microbatch: int, micros: int, shapes: dict[object, int]) -> tuple[int, int]:
        """(number of the first schedule of a mesh with so many micro-batches, how many there are)."""
        first = len(self._staged)
        choices = self.space.pipelines(parallel, microbatch)
        self._staged += [staged_schedule(self.context, parallel, each, micros, shapes) for each in choices]
        return first, len(choices)

    def _least_costs(self) -> tuple[Array, Array]:
        """(least seconds of a step, least bytes) of each row in each set of forms, beside states, as `Pass` has them."""
        import numpy as np

        if not self._rows:
            return np.zeros((len(self.forms), 2, 0)), np.zeros((len(self.forms), 2, 0))
        places, staged = self._places()[self._pass], stacked_schedules(self._staged)
        forms = {form for forms in self.forms for form in forms}
        blocks = {form: self._blocks(form) for form in forms}
        hops = {form: self._hop_seconds(each) for form, each in blocks.items()}
        parts = []
        for start in range(0, self._rows, AT_ONCE):
            some = slice(start, start + AT_ONCE)
            at, schedules, costs = places[some], staged.take(self._schedule[some]), dict[Form, tuple[Array, Array]]()
            for form in forms:
                own = map_fields(lambda column, at=at: column[at], [blocks[form]])
                seconds = self.bounds.step_seconds(schedules, pass_seconds(own), hops[form][self._pass[some]])
                costs[form] = seconds, self.bounds.activation_bytes(schedules, own)
            parts.append([np.stack([reduce(np.minimum, [costs[form][kind] for form in forms]) for forms in self.forms]) for kind in (0, 1)])
        seconds, kept = (np.concatenate(each, axis=2) for each in zip(*parts, strict=True))
        return seconds, kept

    def _places(self) -> Array:
        """The place of each pass in the arrays of `_blocks`."""
        import numpy as np

        passes, (plain, split) = self._passes, map(len, self._splits)
        many = np.where(passes.sequence, split, plain)
        return passes.sequence * len(RECOMPUTES) * plain + passes.recompute * many + passes.split

    def _blocks(self, form: Form) -> BlockCosts:
        """The costs of all splits under each recomputation."""
        import numpy as np

        parts = [blocks_of_splits(self.context, rows, form, RECOMPUTES) for rows in self._splits if rows]
        return map_fields(lambda *each: np.concatenate(each), parts)

    def _hop_seconds(self, blocks: BlockCosts) -> Array:
        """Exposed seconds of a micro-batch's messages into and out of one part of a stage, of each pass."""
        import numpy as np

        passes, run = self._passes, self.space.run
        every: Array = blocks.stream
        stream = every[self._places()]
        if run.parallel.overlap.pipeline:
            return np.zeros(len(stream))
        tp = np.array([each.tp for each in self.meshes])[passes.mesh]
        scattered = run.parallel.scatter and passes.sequence == 0
        payload = np.where(scattered, -(-stream // tp), stream)
        pair = merged_wire([self._wires[mesh].pair for mesh in passes.mesh.tolist()])
        _, seconds = collective_cost("send", payload, pair)
        return 2 * seconds
