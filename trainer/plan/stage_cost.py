"""Costs of a pipeline stage on one rank: memory by kind, seconds of a micro-batch, messages of the data axis."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from ..models.ops.op_table import block_weights
from . import tp_gradient_sums
from .axes import dp
from .axes.dp import DataMessages, GradientSync
from .axes.traffic_row import TrafficRow
from .costs.block_costs import BlockCost, BlockCosts
from .costs.cost_context import CostContext
from .costs.cost_model import PassBytes, StageElements, StateBytes
from .engines import cost_model
from .layout.layout import Layout, StageKind
from .layout.schedules import stage_and_chunk


class StageCost(NamedTuple):
    """One kind of stage. Bytes; seconds of one micro-batch.

    `saved` are the activations of one micro-batch in flight, `saved_last` those that only the current micro-batch keeps, `passing` the
    bytes that a pipeline's engine holds beside them for each in flight. For a moment the passes hold `passes` in addition, and the
    optimizer's step holds `step_bytes`, when activations are freed.
    """

    parameters: int
    weights: int
    version: int  # of an older version of the trained weights
    gradients: int
    optimizer: int
    saved: int
    saved_last: int
    passing: int
    passes: int
    step_bytes: int
    logits: int
    buffers: int
    zero_buffers: int  # those of them that no micro-batch changes
    overhead: int
    forward: float
    backward: float
    weight_gradients: float
    message_forward: float
    message_backward: float
    data: list[DataMessages]  # of the data axis
    exposed: float  # seconds a step of the data axis and of the tensor axis's sums
    step: float  # the optimizer's seconds

    @property
    def fixed_bytes(self) -> int:
        """Bytes that are held all the time, gradients as if each step had several micro-batches."""
        return self.weights + self.gradients + self.optimizer + self.buffers + self.overhead


class HeldStates(NamedTuple):
    """The states of one kind of stage, which no pass changes: elements and bytes on a rank, exposed seconds a step of the tensor axis's
    sums, seconds of the optimizer."""

    held: StageElements
    bytes: StateBytes
    sums: float
    step: float


class SyncedStates(NamedTuple):
    """The states of one kind of stage, and the messages of a step that keep them equal on the ranks of the data axis."""

    states: HeldStates
    messages: list[DataMessages]


class StagePasses(NamedTuple):
    """The passes of a micro-batch on one kind of stage, whatever its states are: seconds, and bytes that it saves and holds."""

    forward: float
    backward: float
    weight_gradients: float
    message_forward: float
    message_backward: float
    saved: int
    held: PassBytes


def stage_costs(context: CostContext, layout: Layout, blocks: BlockCosts, kinds: tuple[StageKind, ...]) -> list[StageCost]:
    """The cost of each of some kinds of stage."""
    rows = zip(kinds, passes_of_kinds(context, layout, blocks, kinds), synced_states(context, layout, blocks, kinds), strict=True)
    in_flight, last, head = logits_in_flight(layout), last_passes(layout), blocks.head
    return [_stage_cost(context, passes, synced, last, head, in_flight if kind.last else 0) for kind, passes, synced in rows]


def _stage_cost(context: CostContext, passes: StagePasses, synced: SyncedStates, last: int, head: BlockCost, logits: int) -> StageCost:
    """The cost of a stage whose data axis's messages may hide under `last` micro-batches, with the logits of `logits` of them in flight."""
    (elements, states, sums, step), messages = synced
    held, forward, backward = passes.held, last * passes.forward, last * passes.backward
    return StageCost(
        parameters=elements.dense + elements.experts,
        weights=states.weights,
        version=context.widths.weight * elements.trained,
        gradients=states.gradients,
        optimizer=states.optimizer,
        saved=passes.saved,
        saved_last=logits * head.saved,
        passing=held.passing,
        passes=states.passes + held.passes,
        step_bytes=states.step,
        logits=logits * head.logits,
        buffers=states.buffers + held.workspace,
        zero_buffers=states.buffers,
        overhead=context.device_context,
        forward=passes.forward,
        backward=passes.backward,
        weight_gradients=passes.weight_gradients,
        message_forward=passes.message_forward,
        message_backward=passes.message_backward,
        data=messages,
        exposed=sum([sums, *[each.exposed(forward, backward) for each in messages]]),
        step=step,
    )


def passes_of_kinds(context: CostContext, layout: Layout, blocks: BlockCosts, kinds: tuple[StageKind, ...]) -> list[StagePasses]:
    """The passes of kinds of stage, cached by all that decides them: `blocks`, what of them a stage has, and what an engine holds for
    stages and their parts."""
    key = (id(blocks), kinds, layout.engine, layout.mesh.pp > 1, layout.chunks, layout.is_folded)
    found: list[StagePasses] | None = context.passes.get(key)
    if found is None:
        found = context.passes[key] = [_stage_passes(context, layout, blocks, kind) for kind in kinds]
    return found


def _stage_passes(context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind) -> StagePasses:
    layers, first, last = kind
    layer = blocks.layer
    forward, backward = layers * (layer.forward or 0.0), layers * (layer.backward or 0.0)
    weight_gradients = layers * layer.weight_gradients
    message_forward, message_backward = layers * layer.message_forward, layers * layer.message_backward
    for here, end in ((first, blocks.embedding), (last, blocks.head)):
        if here:
            forward += end.forward or 0.0
            backward += end.backward or 0.0
            weight_gradients += end.weight_gradients
            message_forward += end.message_forward
            message_backward += end.message_backward
    return StagePasses(
        forward,
        backward,
        weight_gradients,
        message_forward,
        message_backward,
        saved=_saved_bytes(layout, blocks, kind),
        held=cost_model(layout.engine).pass_bytes(context, layout, blocks, kind),
    )


def synced_states(context: CostContext, layout: Layout, blocks: BlockCosts, kinds: tuple[StageKind, ...]) -> list[SyncedStates]:
    """The states of kinds of stage and their messages, cached by all that decides them."""
    parallel = layout.parallel
    key = (
        blocks.elements,
        kinds,
        layout.mesh,
        layout.engine,
        layout.gradient_sync,
        parallel.zero,
        layout.shard,
        parallel.offload.optimizer,
        parallel.offload.parameters,
        parallel.sequence,
        parallel.gather,
        layout.micros > 1,
        layout.delay is None,
    )
    found: list[SyncedStates] | None = context.synced.get(key)
    if found is None:
        found = context.synced[key] = [_synced_states(context, layout, blocks, kind) for kind in kinds]
    return found


def _synced_states(context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind) -> SyncedStates:
    states = held_states(context, layout, blocks, kind)
    return SyncedStates(states, data_messages(context, layout, kind.layers, states.held, layout.gradient_sync))


def held_states(context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind) -> HeldStates:
    """The states of a kind of stage, cached by all that decides them."""
    sync, parallel = layout.gradient_sync, layout.parallel
    key = (
        blocks.elements,
        layout.mesh,
        layout.engine,
        kind,
        parallel.zero,
        layout.shard,
        parallel.offload.optimizer,
        parallel.offload.parameters,
        parallel.overlap.data,
        parallel.sequence,
        parallel.bucket,
        parallel.gather,
        layout.micros > 1,
        sync.often,
        sync.updates,
        layout.delay is None,
    )
    found: HeldStates | None = context.held.get(key)
    if found is None:
        found = context.held[key] = _held_states(context, layout, blocks, kind)
    return found


def _held_states(context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind) -> HeldStates:
    held = stage_elements(blocks, kind)
    sums = tp_gradient_sums.traffic_rows(context, layout, blocks, kind)
    engine = cost_model(layout.engine)
    return HeldStates(
        held,
        engine.state_bytes(context, layout, blocks, kind, held),
        sum([row.exposed for row in sums]),
        layout.gradient_sync.updates * engine.step_seconds(context, layout, held, _tensors(context, kind)),
    )


def stage_elements(blocks: BlockCosts, kind: StageKind) -> StageElements:
    """The parameters on a rank of a kind of stage."""
    layers, first, last = kind
    layer, head = blocks.layer, blocks.head
    dense, frozen, experts = layers * layer.dense, layers * layer.frozen, layers * layer.experts
    for here, end in ((first, blocks.embedding), (last, head)):
        if here:
            dense += end.dense
            frozen += end.frozen
    if first and last:
        dense -= blocks.tied
        frozen -= blocks.tied if head.frozen else 0
    return StageElements(dense, frozen, experts)


def last_passes(layout: Layout) -> int:
    """Micro-batches under whose passes the data axis's messages may hide.

    A chunk's gradients are complete once the last group of micro-batches, one for each stage, has passed it, while the other chunks' are
    still to come (arXiv:2104.04473 section 2.2); of a stage with one part, when its last micro-batch has.
    """
    return min(layout.micros, layout.mesh.pp) if layout.parallel.chunks > 1 else 1


def logits_in_flight(layout: Layout) -> int:
    """Micro-batches whose logits the rank with the head holds at once, from the head's forward to its backward."""
    stages = layout.mesh.pp
    if stages == 1:
        return 1
    schedule = layout.schedule
    if not schedule.simulated:
        return layout.micros if schedule.forward_first else 1
    stage, chunk = stage_and_chunk(len(layout.partition.parts) - 1, stages, folded=layout.is_folded)
    actions = schedule.actions(stage, stages, layout.micros, layout.chunks)
    held = accumulate((action.kind == "F") - (action.kind in "BI") for action in actions if action.chunk == chunk)
    return max(held)


def _saved_bytes(layout: Layout, blocks: BlockCosts, kind: StageKind) -> int:
    """Activations that a stage saves of one micro-batch: its layers', the embedding's, and rotary positions once for each part."""
    saved = kind.layers * blocks.layer.saved + layout.chunks * blocks.saved_once
    return saved + (blocks.embedding.saved - blocks.saved_once if kind.first else 0)


def data_messages(context: CostContext, layout: Layout, layers: int, held: StageElements, sync: GradientSync) -> list[DataMessages]:
    """Messages of the data axis: experts on several ranks are summed only over the ranks that hold the same ones."""
    wires = layout.wires
    if layout.mesh.ep == 1:
        groups = [(held.trained, held.frozen, "data", wires.data, layout.shard)]
    else:
        groups = [
            (held.dense - held.frozen, held.frozen, "data", wires.data, layout.shard),
            (held.experts, 0, "expert_copies", wires.expert_copies, layout.expert_shard),
        ]
    found: list[DataMessages] = []
    for elements, frozen, group, whole, ranks in groups:
        shard, copies = context.shard_wires(layout.mesh, group, whole, ranks)
        found += dp.data_messages(dp.ZeroShards(elements, frozen, whole, shard, copies), sync, layers)
    return found


def data_traffic(layout: Layout, cost: StageCost) -> list[TrafficRow]:
    """Traffic of the data axis on a stage."""
    passes = last_passes(layout)
    return [dp.traffic_row(each, passes * cost.forward, passes * cost.backward) for each in cost.data]


def _tensors(context: CostContext, kind: StageKind) -> int:
    """Tensors of parameters that a stage trains."""
    key = ("tensors", kind)
    if key not in context.memo:
        context.memo[key] = _trained_tensors(context, kind)
    count: int = context.memo[key]
    return count


def _trained_tensors(context: CostContext, kind: StageKind) -> int:
    parts = ((kind.first, context.table.embedding), (kind.layers, context.table.layer), (kind.last, context.table.head))
    return sum([many * sum([not weight.frozen for weight in block_weights(ops)]) for many, ops in parts if many])
