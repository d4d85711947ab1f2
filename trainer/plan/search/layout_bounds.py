"""Lower bounds of a layout's seconds and bytes, known before it is costed. They are computed for many layouts at once, over arrays."""

from __future__ import annotations

from dataclasses import replace

from ...models.ops.op_table import block_weights, element_count
from ...spec.run import Offload
from ..costs.block_costs import BlockCosts
from ..costs.cost_context import CostContext
from ..costs.stage_temporary_bytes import stage_temporary_bytes
from ..engines import ENGINES, cost_model
from ..layout.layout import StageKind
from ..layout_of_run import activation_form
from .space import Zero
from .split_arrays import Array, Form
from .staged_schedules import ROUNDING, PassSeconds, StagedSchedules


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
        return frozenset(
            Form(
                activation_form(self.run, layout, row),
                fused and (row is None or zero < 3),
                cost_model(row.name if row else None).hides_messages,
            )
            for row in self._rows
        )

    def fixed_bytes(self, layers: Array, tp: Array, pp: Array, ep: Array, zero: Zero, offload: Offload) -> Array:
        """The least bytes of the trained weights of a stage with so many layers, and a data rank's share of their gradients and optimizer
        states, on a mesh with these degrees and states. With an offloaded optimizer gradients may leave the device too."""
        width = self.context.widths
        whole = layers * (self.dense + self.experts / ep) / tp
        shard = whole * tp * pp / self.context.world
        weights = 0.0 if offload.parameters else width.weight * (shard if zero == 3 else whole)
        stepped = 0 if offload.optimizer else width.gradient + width.master + self.context.states - self.context.spared
        return self.context.device_context + (weights + shard * stepped) * (1 - ROUNDING)

    def step_seconds(self, schedules: StagedSchedules, blocks: PassSeconds, hop: Array) -> Array:
        """The least seconds of a step under schedules, without the states: in a row those on an engine whose uneven steps have a closed
        form, in another those on one whose uneven steps are simulated. `hop`: seconds of a micro-batch's messages between two parts."""
        return schedules.least_seconds(blocks, hop) * (1 + self.context.tail) + self.context.step_overhead

    def activation_bytes(self, schedules: StagedSchedules, blocks: BlockCosts) -> Array:
        """The least bytes that passes hold, beside states: in a row those on the first stage, in another those on the last."""
        import numpy as np

        stages, whole = (
            ((schedules.first_kind, schedules.kept), (schedules.last_kind, schedules.kept_of_last)),
            1 - schedules.splits_backward,
        )
        return np.stack([self._stage_activation_bytes(kind, kept, whole, blocks) for kind, kept in stages]) * (1 - ROUNDING)

    def _stage_activation_bytes(self, kind: StageKind, kept: Array, whole: Array, blocks: BlockCosts) -> Array:
        """`kept` micro-batches are between forward and backward; where backwards are `whole` (1), one is in the head at the same time."""
        temporary = stage_temporary_bytes(self.context, blocks, kind) if self.runnable else 0
        head = (blocks.head.logits + blocks.head.saved) * kind.last * whole
        return (kind.layers * blocks.layer.saved + (blocks.first.saved - blocks.saved_once) * kind.first) * kept + head + temporary
