"""Lower bounds of a layout's seconds and bytes, known before it is costed.

A block's seconds for each sequence are least on a device that wastes nothing (no partly filled waves, no launches, no latency of links)
with very large micro-batches. That is the same cost function, asked once for all micro-batches, stages, ZeRO stages and schedules of a
split.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ...models.ops.op_table import block_weights, element_count
from ...spec.run import Cluster, Link, Offload, Parallel, Run
from ..axes.axis import ActivationForm
from ..costs.block_costs import BlockCost, BlockCosts
from ..costs.cost_context import CostContext
from ..costs.local_tensors import block_split
from ..engines import ENGINES
from ..layout.layout import LayerPartition, mesh_of
from ..layout.schedule_of_run import schedule_of
from ..layout_of_run import activation_form, stage_partition
from .space import ScheduleChoice, Zero

MANY = 1 << 16  # sequences of the micro-batch
ROUNDING = 1e-6  # relative: sums in another order, a last tile that is not full


Form = tuple[ActivationForm, bool]  # of activations; whether layers are compiled


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
        self._forms: dict[Zero, frozenset[Form]] = {}
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
        least = self.run.train.batch / parallel.dp * max(layers * split.layer, split.model / parallel.pp) * (1 - ROUNDING)
        return least * (1 + self.context.tail) + self.context.step_overhead

    def pass_seconds(self, stages: int, micros: int, blocks: PassSeconds) -> float:
        """The least seconds of a step of so many micro-batches through these blocks, under any schedule: its busiest stage has no fewer
        layers than an even one, and no less to do than the mean stage."""
        layers = self.run.model.layers
        model = layers * blocks.layer + blocks.embedding + blocks.head
        least = micros * max(-(-layers // stages) * blocks.layer, model / stages) * (1 - ROUNDING)
        return least * (1 + self.context.tail) + self.context.step_overhead

    def bytes(self, parallel: Parallel, microbatch: int) -> int:
        """The least bytes of the fullest rank: its states and the activations of a micro-batch."""
        layers = -(-self.run.model.layers // parallel.pp)
        return int(
            self.fixed_bytes(parallel, parallel.zero, parallel.offload) + layers * microbatch * self.split(parallel).saved * (1 - ROUNDING)
        )

    def split(self, parallel: Parallel) -> SplitBound:
        """The bound of a split of blocks, over all forms in which its layers may run."""
        key = (parallel.tp, parallel.cp, parallel.ep, parallel.sequence, parallel.recompute)
        found = self._splits.get(key)
        if found is None:
            every = [self._split_bound(parallel, form, fused) for form, fused in self.forms(0) | self.forms(3)]
            found = self._splits[key] = SplitBound(*map(min, zip(*every, strict=True)))
        return found

    def forms(self, zero: Zero) -> frozenset[Form]:
        """The forms that layers may have at a ZeRO stage: those of the engines that may run a layout, and without one."""
        found = self._forms.get(zero)
        if found is None:
            fused, layout = self.run.train.compile, replace(self.run.parallel, zero=zero)
            rows = [(activation_form(self.run, layout, row), fused and (row is None or zero < 3)) for row in self._rows]
            found = self._forms[zero] = frozenset(rows)
        return found

    def _split_bound(self, parallel: Parallel, form: ActivationForm, fused: bool) -> SplitBound:
        split = block_split(parallel, MANY, form, fused=fused)
        blocks = self.ideal.block_costs(split, self.ideal.wires(mesh_of(parallel, self.context.world)))
        layer = block_seconds(blocks.layer)
        model = self.run.model.layers * layer + block_seconds(blocks.embedding) + block_seconds(blocks.head)
        return SplitBound(layer / MANY, model / MANY, blocks.layer.saved / MANY)

    def fixed_bytes(self, parallel: Parallel, zero: Zero, offload: Offload) -> float:
        """The least bytes of the trained weights of a stage's layers, and a data rank's share of their gradients and optimizer states, on a
        mesh with these states."""
        width = self.context.widths
        layers = -(-self.run.model.layers // parallel.pp)
        whole = layers * (self.dense + self.experts / parallel.ep) / parallel.tp
        shard = whole * parallel.tp * parallel.pp / self.context.world
        weights = 0.0 if offload.parameters else width.weight * (shard if zero == 3 else whole)
        return self.context.device_context + (
            weights + shard * (width.gradient + (0 if offload.optimizer else width.master + self.context.states))
        ) * (1 - ROUNDING)


class PassSeconds(NamedTuple):
    """The seconds of one micro-batch on the blocks of a model under one split."""

    layer: float  # forward and backward, with messages
    embedding: float
    head: float
    layer_weights: float  # of backward, weights' gradients
    ends_weights: float
    layer_forward: float
    embedding_forward: float


def pass_seconds(blocks: BlockCosts) -> PassSeconds:
    """The seconds of a split's blocks."""
    layer, embedding, head = blocks.layer, blocks.embedding, blocks.head
    return PassSeconds(
        layer=block_seconds(layer),
        embedding=block_seconds(embedding),
        head=block_seconds(head),
        layer_weights=layer.weight_gradients,
        ends_weights=embedding.weight_gradients + head.weight_gradients,
        layer_forward=(layer.forward or 0.0) + layer.message_forward,
        embedding_forward=(embedding.forward or 0.0) + embedding.message_forward,
    )


class StagedSchedule(NamedTuple):
    """A schedule of a mesh with so many micro-batches: the layers of its stages, the micro-batches that the first one holds at once; the
    shares of the other stages' seconds that a step waits, and of their weights' gradients that fill the wait; whether it may be simulated.
    """

    choice: ScheduleChoice
    partition: LayerPartition
    micros: int
    parts: int  # of a stage
    in_flight: float
    fill: float
    filled: float
    may_be_simulated: bool
    shape: int  # a number: schedules with the same one have equal states

    def least_seconds(self, each: PassSeconds, hop: float) -> float:
        """Return a lower bound of the seconds of a step's forwards and backwards. With a closed form it is the plan's own count; where the
        plan simulates, the last stage starts after the forwards of the parts before it. `hop`: seconds of a micro-batch's messages
        between two parts."""
        partition, micros, sends = self.partition, self.micros, hop * self.parts
        totals = [k * each.layer + first * each.embedding + last * each.head + sends for k, first, last in partition.kinds]
        busiest = max(totals)
        least = micros * busiest
        if self.fill:
            others = sum([total * many for total, many in zip(totals, partition.stages_of_kind, strict=True)]) - busiest
            wait = self.fill * others
            if self.filled:
                few = min([stage.layers for stage in partition.kinds])
                weights = (partition.starts[-1] - few) * each.layer_weights + each.ends_weights
                wait = max(0.0, wait - self.filled * weights)
            if self.may_be_simulated:
                before = partition.starts[len(partition.counts) - 1] * each.layer_forward + each.embedding_forward
                started = micros * totals[partition.kind_of_stage[-1]] + before
                return min(least + wait, max(least, started)) * (1 - ROUNDING)
            least += wait
        return least * (1 - ROUNDING)


def staged_schedule(
    context: CostContext, parallel: Parallel, choice: ScheduleChoice, micros: int, shapes: dict[object, int]
) -> StagedSchedule:
    """A schedule of a mesh's stages; `shapes` numbers what decides the states of stages."""
    changed = replace(parallel, schedule=choice.schedule, chunks=choice.chunks)
    schedule, stages = schedule_of(changed), parallel.pp
    is_uneven = schedule.folded or schedule.splits_backward
    partition = stage_partition(context, changed)
    has_closed_form = stages > 1 and not schedule.simulated and not parallel.stages
    return StagedSchedule(
        choice=choice,
        partition=partition,
        micros=micros,
        parts=schedule.parts(choice.chunks) if stages > 1 else 0,
        in_flight=schedule.in_flight(0, stages, micros, choice.chunks) if stages > 1 else 1.0,
        fill=schedule.fill(choice.chunks) if has_closed_form else 0.0,
        filled=schedule.filled_by_weights(stages, micros) if has_closed_form else 0.0,
        may_be_simulated=is_uneven,
        shape=shapes.setdefault((partition.kinds, partition.is_folded, schedule.flushes or micros), len(shapes)),
    )


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
