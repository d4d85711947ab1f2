"""Lower bounds of a layout's seconds and bytes, known before it is costed.

A block's seconds for each sequence are least on a device that wastes nothing (no partly filled waves, no launches, no latency of links)
with very large micro-batches. That is the same cost function, asked once for all micro-batches, stages, ZeRO stages and schedules of a
split.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

from ...models.ops.op_table import block_weights, element_count
from ...spec.run import Cluster, Link, Parallel, Run
from ..axes.axis import ActivationForm
from ..costs.block_costs import BlockCost, BlockCosts
from ..costs.cost_context import CostContext
from ..costs.local_tensors import block_split
from ..engines import ENGINES
from ..layout.layout import LayerPartition, mesh_of
from ..layout.schedules import Schedule
from ..run_layout import activation_form

MANY = 1 << 16  # sequences of the micro-batch
ROUNDING = 1e-6  # relative: sums in another order, a last tile that is not full


class SplitBound(NamedTuple):
    """The least seconds of a step and the least bytes of activations of one micro-batch, for one sequence of each."""

    layer: float  # seconds of a layer
    model: float  # seconds of all layers, embedding and head
    saved: float  # bytes that a layer saves


class Bounds:
    """The bounds of a run's layouts."""

    def __init__(self, context: CostContext, *, runnable: bool) -> None:
        self.run, self.context = context.run, context
        self._rows = [*ENGINES.values(), *([] if runnable else [None])]
        self.ideal = CostContext(ideal_run(context.run))
        self._splits: dict[tuple[object, ...], SplitBound] = {}
        sizes = context.table.sizes
        weights = [(each.dims, element_count(each.dims, sizes)) for each in block_weights(context.table.layer) if not each.frozen]
        self.dense = sum(elements for dims, elements in weights if "experts" not in dims)  # of a layer
        self.experts = sum(elements for dims, elements in weights if "experts" in dims)

    def seconds(self, parallel: Parallel) -> float:
        """The least seconds of a step: all sequences of a replica on its busiest stage, or on all of its stages in turn."""
        if self.ideal.rates is None:
            return 0.0
        split = self.split(parallel)
        assert parallel.dp != "auto"
        layers = -(-self.run.model.layers // parallel.pp)
        return self.run.train.batch / parallel.dp * max(layers * split.layer, split.model / parallel.pp) * (1 - ROUNDING)

    def bytes(self, parallel: Parallel, microbatch: int) -> int:
        """The least bytes of the fullest rank: its states and the activations of a micro-batch."""
        layers = -(-self.run.model.layers // parallel.pp)
        return int(self.fixed_bytes(parallel) + layers * microbatch * self.split(parallel).saved * (1 - ROUNDING))

    def split(self, parallel: Parallel) -> SplitBound:
        """The bound of a split of blocks, over all forms in which its layers may run."""
        key = (parallel.tp, parallel.cp, parallel.ep, parallel.sequence, parallel.recompute)
        found = self._splits.get(key)
        if found is None:
            every = [self._split_bound(parallel, form, fused) for form, fused in self._every_form(parallel)]
            found = self._splits[key] = SplitBound(*map(min, zip(*every, strict=True)))
        return found

    def forms(self, parallel: Parallel) -> set[tuple[ActivationForm, bool]]:
        """(form of activations, whether compiled) of the engines that may run a layout, and without one."""
        fused = self.run.train.compile
        return {(activation_form(self.run, parallel, row), fused and (row is None or parallel.zero < 3)) for row in self._rows}

    def _every_form(self, parallel: Parallel) -> set[tuple[ActivationForm, bool]]:
        zeros: tuple[Literal[0, 3], ...] = (0, 3) if self.run.train.compile else (0,)
        return {form for zero in zeros for form in self.forms(replace(parallel, zero=zero))}

    def _split_bound(self, parallel: Parallel, form: ActivationForm, fused: bool) -> SplitBound:
        split = block_split(parallel, MANY, form, fused=fused)
        blocks = self.ideal.block_costs(split, self.ideal.wires(mesh_of(parallel, self.context.world)))
        layer = block_seconds(blocks.layer)
        model = self.run.model.layers * layer + block_seconds(blocks.embedding) + block_seconds(blocks.head)
        return SplitBound(layer / MANY, model / MANY, blocks.layer.saved / MANY)

    def fixed_bytes(self, parallel: Parallel) -> float:
        """The least bytes of the trained weights of a stage's layers, and a data rank's share of their gradients and optimizer states."""
        width, offload = self.context.widths, parallel.offload
        layers = -(-self.run.model.layers // parallel.pp)
        whole = layers * (self.dense + self.experts / parallel.ep) / parallel.tp
        shard = whole * parallel.tp * parallel.pp / self.context.world
        weights = 0.0 if offload.parameters else width.weight * (shard if parallel.zero == 3 else whole)
        return self.context.device_context + (
            weights + shard * (width.gradient + (0 if offload.optimizer else width.master + self.context.states))
        ) * (1 - ROUNDING)


def pipeline_seconds(blocks: BlockCosts, partition: LayerPartition, micros: int, fill: float) -> float:
    """The least seconds of a step's forwards and backwards: its micro-batches on the busiest stage, and a share `fill` of a micro-batch on
    each other one."""
    layer, ends = block_seconds(blocks.layer), (block_seconds(blocks.embedding), block_seconds(blocks.head))
    totals = [layers * layer + first * ends[0] + last * ends[1] for layers, first, last in partition.kinds]
    busiest = max(totals)
    others = sum(total * many for total, many in zip(totals, partition.stages_of_kind, strict=True)) - busiest
    return (micros * busiest + fill * others) * (1 - ROUNDING)


def least_fill(schedule: Schedule, chunks: int) -> float:
    """The share of the other stages' seconds that a step waits under a schedule whose closed form holds; 0 for one that is simulated."""
    return 0.0 if schedule.simulated or schedule.splits_backward or schedule.folded else schedule.fill(chunks)


def block_seconds(block: BlockCost) -> float:
    """Seconds of a block's forward and backward, with its messages."""
    return (block.forward or 0.0) + (block.backward or 0.0) + block.message_forward + block.message_backward


def ideal_run(run: Run) -> Run:
    """The run on devices and links that lose no time."""
    device = replace(run.cluster.device, units=1, launch=0.0, dispatch=0.0)
    cluster: Cluster = replace(
        run.cluster, device=device, inside=_without_latency(run.cluster.inside), between=_without_latency(run.cluster.between)
    )
    return replace(run, cluster=cluster)


def _without_latency(link: Link | None) -> Link | None:
    return replace(link, latency=0.0) if link else None
