"""The least that a layout's states cost, whatever its passes are: states of another mesh that lie on the same wires cost the same."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from ..axes.dp import GradientSync
from ..costs.block_costs import BlockCosts
from ..costs.cost_context import CostContext
from ..costs.cost_model import StageElements
from ..layout.layout import Layout, StageKind
from ..stage_cost import data_traffic, held_states
from .bounds import ROUNDING


class LeastStates(NamedTuple):
    """The least costs of a layout's states: bytes on a rank of the first stage, held all the time, beside activations in the passes, and
    in the optimizer's step; exposed seconds of the data axis, of the tensor axis's sums and of the optimizer, once a step and for each
    micro-batch."""

    fixed: int
    passes: int
    step: int
    once: float
    each: float

    def seconds(self, micros: int) -> float:
        """The least seconds of a step with so many micro-batches."""
        return self.once + micros * self.each

    def bytes(self, kept: float) -> float:
        """The least bytes beside activations of `kept` bytes."""
        return self.fixed + max(kept + self.passes, self.step)


def least_states(context: CostContext, layout: Layout, blocks: BlockCosts) -> LeastStates:
    """Return lower bounds of what the first stage's states cost. Messages that computation can hide are taken as hidden. Those of a layout
    of one micro-batch hold for passes of one, those of a layout of several for passes of several."""
    kind, sync = layout.partition.kinds[layout.partition.kind_of_stage[0]], layout.gradient_sync
    held, states, sums, step = held_states(context, layout, blocks, kind)
    sent = _exposed_seconds(context, layout, kind, held, sync)
    each = 0.0
    if sync.micros == layout.micros:  # messages of each micro-batch, if there are such
        each = (sent - _exposed_seconds(context, layout, kind, held, sync._replace(micros=0))) / layout.micros
    return LeastStates(
        fixed=states.weights + states.gradients + states.optimizer + states.buffers + context.device_context,
        passes=states.passes,
        step=states.step,
        once=(step + sums + sent - layout.micros * each) * (1 - ROUNDING),
        each=each * (1 - ROUNDING),
    )


def _exposed_seconds(context: CostContext, layout: Layout, kind: StageKind, held: StageElements, sync: GradientSync) -> float:
    return sum([row.exposed for row in data_traffic(context, layout, kind.layers, held, sync, inf, inf)])
