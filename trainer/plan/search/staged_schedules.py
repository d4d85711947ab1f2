"""Schedules on the stages of a mesh, and lower bounds of the seconds of a step under many of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from ...spec.changed_run import with_values
from ...spec.run import Parallel
from ..costs.block_costs import BlockCost, BlockCosts
from ..costs.cost_context import CostContext
from ..costs.number_or_array import larger
from ..layout.held_passes import held_passes
from ..layout.layout import LayerPartition, StageKind
from ..layout.schedule_of_run import schedule_of
from ..layout.schedules import Schedule
from ..layout_of_run import stage_partition
from ..part_seconds import MOST_PASSES
from .space import ScheduleChoice
from .split_arrays import Array

ROUNDING = 1e-6  # relative: sums in another order


class PassSeconds(NamedTuple):
    """The seconds of one micro-batch on the blocks of a model under one split."""

    layer: Array  # forward and backward, with messages
    first: Array  # of all blocks before the layers
    head: Array
    layer_weights: Array  # of backward, weights' gradients
    ends_weights: Array
    head_weights: Array
    layer_forward: Array
    first_forward: Array
    head_forward: Array


def pass_seconds(blocks: BlockCosts) -> PassSeconds:
    """The seconds of a split's blocks."""
    layer, first, head = blocks.layer, blocks.first, blocks.head
    return PassSeconds(
        layer=_block_seconds(layer),
        first=_block_seconds(first),
        head=_block_seconds(head),
        layer_weights=layer.weight_gradients,
        ends_weights=first.weight_gradients + head.weight_gradients,
        head_weights=head.weight_gradients,
        layer_forward=_seconds_or_zero(layer.forward) + layer.message_forward,
        first_forward=_seconds_or_zero(first.forward) + first.message_forward,
        head_forward=_seconds_or_zero(head.forward) + head.message_forward,
    )


def _block_seconds(block: BlockCost) -> Array:
    """Seconds of a block's forward and backward, with its messages."""
    return _seconds_or_zero(block.forward) + _seconds_or_zero(block.backward) + block.message_forward + block.message_backward


def _seconds_or_zero(seconds: Array) -> Array:
    return 0.0 if seconds is None else seconds


class StagedSchedule(NamedTuple):
    """A schedule of a mesh with so many micro-batches: the layers of its stages, the micro-batches that the first holds at
    once; the shares of the other stages' seconds that a step waits, and of their weights' gradients that fill the wait; on which engines
    a step is simulated."""

    choice: ScheduleChoice
    partition: LayerPartition
    micros: int
    parts: int  # of a stage
    in_flight: float
    kept: float  # of those that the first and the last hold the ones between forward and backward, on every engine
    kept_of_last: float
    fill: float
    filled: float
    simulated: bool  # on every engine
    simulated_if_uneven: bool  # on engines that simulate uneven steps
    splits_backward: bool
    shape: int  # a number: under schedules with the same one the first and the last stage have equal states


@dataclass(frozen=True, kw_only=True)
class StagedSchedules:
    """Several schedules: arrays with an element for each."""

    kinds: list[StageKind]  # of stages, each with its arrays; those that a schedule does not have hold nothing
    stages_of_kind: list[Array]
    first_kind: StageKind  # of the first stage
    last_kind: StageKind
    fewest: Array  # layers of a stage
    layers: Array  # of the model
    before_last: Array  # layers of the parts before the last stage's first one
    behind: Array  # layers of the parts behind the first stage's last one
    own_parts: Array  # of the first stage: how many parts it has, the layers of the first of them, the most of the others
    own_first: Array
    own_others: Array
    stages: Array
    is_folded: Array
    micros: Array
    parts: Array
    in_flight: Array
    kept: Array
    kept_of_last: Array
    fill: Array
    filled: Array
    splits_backward: Array
    simulated: Array
    simulated_if_uneven: Array

    def take(self, at: Array) -> StagedSchedules:
        """The schedules at these places."""
        return StagedSchedules(**{field.name: _take(getattr(self, field.name), at) for field in fields(self)})

    def least_seconds(self, each: PassSeconds, hop: Array) -> Array:
        """Return lower bounds of the seconds of a step's forwards and backwards, in two rows as `Bounds.step_seconds` has them: the plan's
        closed form, and `_least_simulated` where a step is simulated. `hop`: seconds of a micro-batch's messages between two parts."""
        import numpy as np

        sends = hop * self.parts

        def total(kind: StageKind) -> Array:
            return kind.layers * each.layer + kind.first * each.first + kind.last * each.head + sends

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
        """Return a lower bound of a simulated step in which the first and the last stage take so many seconds a micro-batch. The last stage
        starts after the forwards of the parts before its first one. The first stage's first backward comes after a micro-batch's forwards,
        and the backwards of the parts behind its own; before it, that stage runs no more forwards than it has micro-batches in flight."""
        started = self.before_last * each.layer_forward + each.first_forward + (self.stages - 1) * hop / 2
        forwards = self.layers * each.layer_forward + each.first_forward + each.head_forward
        backwards = self.behind * (each.layer - each.layer_forward - self.splits_backward * each.layer_weights)
        backwards += (1 - self.is_folded) * (each.head - each.head_forward - self.splits_backward * each.head_weights)
        others = self.own_others * each.layer_forward + self.is_folded * each.head_forward
        longest = larger(self.own_first * each.layer_forward + each.first_forward, others)
        idle = forwards + backwards - self.in_flight * longest * self.own_parts
        return larger(self.micros * last + started, self.micros * first + idle)


def stacked_schedules(rows: Sequence[StagedSchedule]) -> StagedSchedules:
    """The schedules as arrays."""
    import numpy as np

    partitions = [row.partition for row in rows]
    most = max(len(each.kinds) for each in partitions)
    none = StageKind(0, first=False, last=False)
    kinds = [(*each.kinds, *[none] * most) for each in partitions]
    many = [(*each.stages_of_kind, *[0] * most) for each in partitions]
    own = [each.parts[:: len(each.parts) - 1 if each.is_folded else len(each.counts)] for each in partitions]  # of the first stage
    same = (
        "micros",
        "parts",
        "in_flight",
        "kept",
        "kept_of_last",
        "fill",
        "filled",
        "splits_backward",
        "simulated",
        "simulated_if_uneven",
    )
    return StagedSchedules(
        kinds=[_stacked_kinds([row[at] for row in kinds]) for at in range(most)],
        stages_of_kind=[np.array([row[at] for row in many]) for at in range(most)],
        first_kind=_stacked_kinds([each.kinds[each.kind_of_stage[0]] for each in partitions]),
        last_kind=_stacked_kinds([each.kinds[each.kind_of_stage[-1]] for each in partitions]),
        fewest=np.array([min([kind.layers for kind in each.kinds]) for each in partitions]),
        layers=np.array([sum(each.parts) for each in partitions]),
        before_last=np.array([sum(each.parts[: len(each.counts) - 1]) for each in partitions]),
        behind=np.array([0 if each.is_folded else sum(each.parts[len(each.parts) - len(each.counts) + 1 :]) for each in partitions]),
        own_parts=np.array([len(each) for each in own]),
        own_first=np.array([each[0] for each in own]),
        own_others=np.array([max(each[1:], default=0) for each in own]),
        stages=np.array([len(each.counts) for each in partitions]),
        is_folded=np.array([each.is_folded for each in partitions]),
        **{name: np.array([getattr(row, name) for row in rows]) for name in same},
    )


def _stacked_kinds(rows: Sequence[StageKind]) -> StageKind:
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
    changed = with_values(parallel, schedule=choice.schedule, chunks=choice.chunks)
    schedule, stages = schedule_of(changed), parallel.pp
    partition = stage_partition(context, changed)
    simulated = schedule.flushes and (schedule.simulated or bool(parallel.stages))  # as is_simulated (part_seconds.py) says
    uneven = schedule.folded or schedule.splits_backward
    has_closed_form = stages > 1 and not schedule.simulated and not parallel.stages
    return StagedSchedule(
        choice=choice,
        partition=partition,
        micros=micros,
        parts=schedule.parts(choice.chunks) if stages > 1 else 0,
        in_flight=schedule.in_flight(0, stages, micros, choice.chunks) if stages > 1 else 1.0,
        kept=_least_kept(schedule, 0, stages, micros, choice.chunks),
        kept_of_last=_least_kept(schedule, stages - 1, stages, micros, choice.chunks),
        fill=schedule.fill(choice.chunks) if has_closed_form else 0.0,
        filled=schedule.filled_by_weights(stages, micros) if has_closed_form else 0.0,
        simulated=simulated,
        simulated_if_uneven=simulated or (stages > 1 and uneven and len(partition.parts) * micros <= MOST_PASSES),
        splits_backward=schedule.splits_backward,
        shape=shapes.setdefault(
            (*[partition.kinds[partition.kind_of_stage[at]] for at in (0, -1)], schedule.flushes or micros, partition.is_folded),
            len(shapes),
        ),
    )


def _least_kept(schedule: Schedule, stage: int, stages: int, micros: int, chunks: int) -> float:
    """The micro-batches between forward and backward that a stage holds at least at one time."""
    if stages == 1:
        return 1.0
    if not schedule.splits_backward:
        return schedule.in_flight(stage, stages, micros, chunks)
    return max([each.saved for each in held_passes(schedule, stage, stages, micros, chunks)])
