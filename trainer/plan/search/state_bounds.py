"""The least that a layout's states cost, whatever its passes are: bytes, which states of another mesh with as many tensor-parallel, expert
and data ranks hold too, and seconds, which those on the same wires take too."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from ..axes.dp import GradientSync
from ..costs.block_costs import BlockCosts
from ..costs.cost_context import CostContext
from ..costs.cost_model import StageElements
from ..engines import cost_model
from ..layout.layout import Layout, StageKind
from ..stage_cost import data_messages, held_states, stage_elements
from .staged_schedules import ROUNDING


class StageStates(NamedTuple):
    """Bytes of a stage's states: held all the time, beside activations in the passes, and in the optimizer's step."""

    fixed: int
    passes: int
    step: int


class LeastBytes(NamedTuple):
    """The least bytes of a layout's states on a rank of the first and of the last stage."""

    first: StageStates
    last: StageStates

    def bytes(self, kept: tuple[float, float]) -> float:
        """The least bytes beside activations of `kept` bytes on the first and on the last stage."""
        (fixed, passes, step), (fixed_of_last, passes_of_last, step_of_last) = self
        return max(fixed + max(kept[0] + passes, step), fixed_of_last + max(kept[1] + passes_of_last, step_of_last))


class LeastSeconds(NamedTuple):
    """The least exposed seconds of the data axis, of the tensor axis's sums and of the optimizer: once a step, for each micro-batch."""

    once: float
    each: float

    def seconds(self, micros: int) -> float:
        """The least seconds of a step with so many micro-batches."""
        return self.once + micros * self.each


def least_bytes(context: CostContext, layout: Layout, blocks: BlockCosts) -> LeastBytes:
    """Return the bytes that the states of the first and the last stage hold, of this layout and of others whose micro-batches are as this
    one's: one a step, or several."""
    partition = layout.partition
    first, last = (partition.kinds[partition.kind_of_stage[at]] for at in (0, -1))
    held = _stage_states(context, layout, blocks, first)
    return LeastBytes(held, held if first == last else _stage_states(context, layout, blocks, last))


def _stage_states(context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind) -> StageStates:
    states = cost_model(layout.engine).state_bytes(context, layout, blocks, kind, stage_elements(blocks, kind))
    fixed = states.weights + states.gradients + states.optimizer + states.buffers + context.device_context
    return StageStates(fixed, states.passes, states.step)


def least_seconds(context: CostContext, layout: Layout, blocks: BlockCosts) -> LeastSeconds:
    """Return lower bounds of the seconds that the states of the first stage take. Messages that computation can hide are taken as hidden.
    Those of a layout of one micro-batch hold for passes of one, those of a layout of several for passes of several."""
    partition, sync = layout.partition, layout.gradient_sync
    kind = partition.kinds[partition.kind_of_stage[0]]
    states = held_states(context, layout, blocks, kind)
    sent = _exposed_seconds(context, layout, kind, states.elements, sync)
    each = 0.0
    if sent and sync.micros == layout.micros:  # messages of each micro-batch, if there are such
        each = (sent - _exposed_seconds(context, layout, kind, states.elements, sync._replace(micros=0))) / layout.micros
    return LeastSeconds(once=(states.step + states.sums + sent - layout.micros * each) * (1 - ROUNDING), each=each * (1 - ROUNDING))


def _exposed_seconds(context: CostContext, layout: Layout, kind: StageKind, held: StageElements, sync: GradientSync) -> float:
    return sum([each.exposed_seconds(inf, inf, inf) for each in data_messages(context, layout, kind, held, sync)])
