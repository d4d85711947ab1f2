"""Lower bounds of a layout's seconds and bytes, known before it is costed. They are computed for many layouts at once, over arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...models.ops.op_table import block_weights, element_count
from ...spec.run import Offload, Parallel
from ..axes.axis import ActivationForm
from ..costs.block_costs import BlockCost, BlockCosts
from ..costs.cost_context import CostContext
from ..costs.elementwise import larger
from ..costs.stage_temporary_bytes import stage_temporary_bytes
from ..engines import ENGINES
from ..layout.layout import LayerPartition, StageKind
from ..layout.schedule_of_run import schedule_of
from ..layout_of_run import activation_form, stage_partition
from ..part_seconds import MOST_PASSES
from .space import ScheduleChoice, Zero
from .split_arrays import Array

ROUNDING = 1e-6  # relative: sums in another order

Form = tuple[ActivationForm, bool]  # of activations; whether layers are compiled


class Bounds:
    """The bounds of a run's layouts."""

    def __init__(self, context: CostContext, *, runnable: bool) -> None:
        self.run, self.context, self.runnable = context.run, context, runnable
        self._rows = [*ENGINES.values(), *([] if runnable else [None])]
        sizes = context.table.sizes
        weights = [(each.dims, element_count(each.dims, sizes)) for each in block_weights(context.table.layer) if not each.frozen]
        self.dense = sum(elements for dims, elements in weights if "experts" not in dims)  # of a layer
        self.experts = sum(elements for dims, elements in weights if "experts" in dims)

    def forms(self, zero: Zero) -> frozenset[Form]:
        """The forms that layers may have at a ZeRO stage: those of the engines that may run a layout, and without one."""
        fused, layout = self.run.train.compile, replace(self.run.parallel, zero=zero)
        return frozenset((activation_form(self.run, layout, row), fused and (row is None or zero < 3)) for row in self._rows)

    def fixed_bytes(self, tp: Array, pp: Array, ep: Array, zero: Zero, offload: Offload) -> Array:
        """The least bytes of the trained weights of a stage's layers, and a data rank's share of their gradients and optimizer states, on a
        mesh with these degrees and states."""
        width = self.context.widths
        layers = -(-self.run.model.layers // pp)
        whole = layers * (self.dense + self.experts / ep) / tp
        shard = whole * tp * pp / self.context.world
        weights = 0.0 if offload.parameters else width.weight * (shard if zero == 3 else whole)
        return self.context.device_context + (
            weights + shard * (width.gradient + (0 if offload.optimizer else width.master + self.context.states))
        ) * (1 - ROUNDING)

    def step_seconds(self, schedules: StagedSchedules, blocks: PassSeconds, hop: Array) -> Array:
        """The least seconds of a step under schedules, without the states: in a row those on an engine whose uneven steps have a closed
        form, in another those on one whose uneven steps are simulated. `hop`: seconds of a micro-batch's messages between two parts."""
        return schedules.least_seconds(blocks, hop) * (1 + self.context.tail) + self.context.step_overhead

    def activation_bytes(self, schedules: StagedSchedules, blocks: BlockCosts) -> Array:
        """The least bytes that passes hold, beside states: in a row those on the first stage, in another those on the last."""
        import numpy as np

        stages = ((schedules.first_kind, schedules.in_flight), (schedules.last_kind, schedules.in_flight_of_last))
        return np.stack([self._stage_activation_bytes(kind, in_flight, blocks) for kind, in_flight in stages]) * (1 - ROUNDING)

    def _stage_activation_bytes(self, kind: StageKind, in_flight: Array, blocks: BlockCosts) -> Array:
        temporary = stage_temporary_bytes(self.context, blocks, kind) if self.runnable else 0
        ends = (blocks.embedding.saved - blocks.saved_once) * kind.first * in_flight + (blocks.head.logits + blocks.head.saved) * kind.last
        return kind.layers * blocks.layer.saved * in_flight + ends + temporary


class PassSeconds(NamedTuple):
    """The seconds of one micro-batch on the blocks of a model under one split."""

    layer: Array  # forward and backward, with messages
    embedding: Array
    head: Array
    layer_weights: Array  # of backward, weights' gradients
    ends_weights: Array
    head_weights: Array
    layer_forward: Array
    embedding_forward: Array
    head_forward: Array


def pass_seconds(blocks: BlockCosts) -> PassSeconds:
    """The seconds of a split's blocks."""
    layer, embedding, head = blocks.layer, blocks.embedding, blocks.head
    return PassSeconds(
        layer=_block_seconds(layer),
        embedding=_block_seconds(embedding),
        head=_block_seconds(head),
        layer_weights=layer.weight_gradients,
        ends_weights=embedding.weight_gradients + head.weight_gradients,
        head_weights=head.weight_gradients,
        layer_forward=_known(layer.forward) + layer.message_forward,
        embedding_forward=_known(embedding.forward) + embedding.message_forward,
        head_forward=_known(head.forward) + head.message_forward,
    )


def _block_seconds(block: BlockCost) -> Array:
    """Seconds of a block's forward and backward, with its messages."""
    return _known(block.forward) + _known(block.backward) + block.message_forward + block.message_backward


def _known(seconds: Array) -> Array:
    return 0.0 if seconds is None else seconds


class StagedSchedule(NamedTuple):
    """A schedule of a mesh with so many micro-batches: the layers of its stages, the micro-batches that the first and the last hold at
    once; the shares of the other stages' seconds that a step waits, and of their weights' gradients that fill the wait; on which engines
    a step is simulated."""

    choice: ScheduleChoice
    partition: LayerPartition
    micros: int
    parts: int  # of a stage
    in_flight: float
    in_flight_of_last: float
    fill: float
    filled: float
    simulated: bool  # on every engine
    simulated_if_uneven: bool  # on engines that simulate uneven steps
    splits_backward: bool
    shape: int  # a number: under schedules with the same one the first and the last stage have equal states


class StagedSchedules:
    """Several schedules: arrays with an element for each."""

    def __init__(self, rows: Sequence[StagedSchedule]) -> None:
        import numpy as np

        partitions = [row.partition for row in rows]
        most = max(len(each.kinds) for each in partitions)
        none = StageKind(0, first=False, last=False)
        kinds = [(*each.kinds, *[none] * (most - len(each.kinds))) for each in partitions]
        self.kinds = [_kinds([row[at] for row in kinds]) for at in range(most)]
        self.stages_of_kind = [np.array([[*each.stages_of_kind, *[0] * most][at] for each in partitions]) for at in range(most)]
        self.first_kind = _kinds([each.kinds[each.kind_of_stage[0]] for each in partitions])
        self.last_kind = _kinds([each.kinds[each.kind_of_stage[-1]] for each in partitions])
        self.fewest = np.array([min([kind.layers for kind in each.kinds]) for each in partitions])
        self.layers = partitions[0].starts[-1]
        self.stages = np.array([len(each.counts) for each in partitions])
        self.before_last = np.array([each.starts[len(each.counts) - 1] for each in partitions])  # layers
        own = [each.parts[:: len(each.parts) - 1 if each.is_folded else len(each.counts)] for each in partitions]  # of the first stage
        self.own_parts = np.array([len(each) for each in own])
        self.own_first = np.array([each[0] for each in own])  # layers
        self.own_others = np.array([max(each[1:], default=0) for each in own])
        behind = [each.is_folded or (len(each.parts) - 1) // len(each.counts) * len(each.counts) for each in partitions]
        self.behind = np.array(
            [0 if each.is_folded else self.layers - each.starts[at + 1] for each, at in zip(partitions, behind, strict=True)]
        )
        self.is_folded = np.array([each.is_folded for each in partitions])
        self.micros, self.parts, self.in_flight, self.in_flight_of_last, self.fill, self.filled, self.splits_backward = (
            np.array([getattr(row, name) for row in rows])
            for name in ("micros", "parts", "in_flight", "in_flight_of_last", "fill", "filled", "splits_backward")
        )
        self.simulated = np.array([row.simulated for row in rows])
        self.simulated_if_uneven = np.array([row.simulated or (row.simulated_if_uneven and len(row.partition.counts) > 1) for row in rows])

    def take(self, at: Array) -> StagedSchedules:
        """The schedules at these places."""
        found = StagedSchedules.__new__(StagedSchedules)
        for name, value in vars(self).items():
            setattr(found, name, _take(value, at))
        return found

    def least_seconds(self, each: PassSeconds, hop: Array) -> Array:
        """Return lower bounds of the seconds of a step's forwards and backwards, as `Bounds.step_seconds`: the plan's closed form, and
        `_least_simulated` where a step is simulated. `hop`: seconds of a micro-batch's messages between two parts."""
        import numpy as np

        sends = hop * self.parts

        def total(kind: StageKind) -> Array:
            return kind.layers * each.layer + kind.first * each.embedding + kind.last * each.head + sends

        totals = [total(kind) for kind in self.kinds]
        busiest = totals[0]
        for row in totals[1:]:
            busiest = larger(busiest, row)
        others = sum([row * many for row, many in zip(totals, self.stages_of_kind, strict=True)]) - busiest
        weights = (self.layers - self.fewest) * each.layer_weights + each.ends_weights
        least = self.micros * busiest
        wait = larger(0.0, self.fill * others - self.filled * weights)
        simulated = larger(least, self._least_simulated(each, hop, total(self.first_kind), total(self.last_kind)))
        every = [np.where(here, simulated, least + wait) for here in (self.simulated, self.simulated_if_uneven)]
        return np.stack(every) * (1 - ROUNDING)

    def _least_simulated(self, each: PassSeconds, hop: Array, first: Array, last: Array) -> Array:
        """As `least_wait` (part_seconds.py) bounds the step in which the first and the last stage compute so many seconds a micro-batch."""
        started = self.before_last * each.layer_forward + each.embedding_forward + (self.stages - 1) * hop / 2
        forwards = self.layers * each.layer_forward + each.embedding_forward + each.head_forward
        backwards = self.behind * (each.layer - each.layer_forward - self.splits_backward * each.layer_weights)
        backwards += (1 - self.is_folded) * (each.head - each.head_forward - self.splits_backward * each.head_weights)
        others = self.own_others * each.layer_forward + self.is_folded * each.head_forward
        longest = larger(self.own_first * each.layer_forward + each.embedding_forward, others)
        idle = forwards + backwards - self.in_flight * longest * self.own_parts
        return larger(self.micros * last + started, self.micros * first + idle)


def _kinds(rows: Sequence[StageKind]) -> StageKind:
    """The kinds as one whose fields are arrays."""
    import numpy as np

    layers, first, last = (np.array(each) for each in zip(*rows, strict=True))
    arrays: list[Any] = [layers, first, last]
    return StageKind(*arrays)


def _take(value: Any, at: Array) -> Any:
    import numpy as np

    if isinstance(value, StageKind):
        return StageKind(*[_take(each, at) for each in value])
    if isinstance(value, list):
        return [_take(each, at) for each in value]
    return value[at] if isinstance(value, np.ndarray) else value


def staged_schedule(
    context: CostContext, parallel: Parallel, choice: ScheduleChoice, micros: int, shapes: dict[object, int]
) -> StagedSchedule:
    """A schedule of a mesh's stages; `shapes` numbers what decides the states of stages."""
    changed = replace(parallel, schedule=choice.schedule, chunks=choice.chunks)
    schedule, stages = schedule_of(changed), parallel.pp
    partition = stage_partition(context, changed)
    has_closed_form = stages > 1 and not schedule.simulated and not parallel.stages
    return StagedSchedule(
        choice=choice,
        partition=partition,
        micros=micros,
        parts=schedule.parts(choice.chunks) if stages > 1 else 0,
        in_flight=schedule.in_flight(0, stages, micros, choice.chunks) if stages > 1 else 1.0,
        in_flight_of_last=schedule.in_flight(stages - 1, stages, micros, choice.chunks) if stages > 1 else 1.0,
        fill=schedule.fill(choice.chunks) if has_closed_form else 0.0,
        filled=schedule.filled_by_weights(stages, micros) if has_closed_form else 0.0,
        simulated=schedule.flushes and (schedule.simulated or bool(parallel.stages)),
        simulated_if_uneven=(schedule.folded or schedule.splits_backward) and len(partition.parts) * micros <= MOST_PASSES,
        splits_backward=schedule.splits_backward,
        shape=shapes.setdefault(
            (*[partition.kinds[partition.kind_of_stage[at]] for at in (0, -1)], schedule.flushes or micros, partition.is_folded),
            len(shapes),
        ),
    )
