"""Costs of a pipeline stage on one rank: memory by kind, seconds of a micro-batch, messages of the data axis."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from ..models.ops.op_table import block_weights
from . import tp_gradient_sums
from .axes import dp
from .axes.dp import DataMessages, GradientSync
from .axes.traffic_row import TrafficRow
from .costs.block_costs import BlockCosts
from .costs.checkpoint import saved_part_bytes
from .costs.cost_context import CostContext
from .costs.cost_model import PassBytes, StageElements, StateBytes
from .engines import cost_model
from .layout.gradient_routes import server_ranks
from .layout.layout import Layout, StageKind
from .layout.schedules import stage_and_chunk


class HeldStates(NamedTuple):
    """The states of one kind of stage, which no pass changes, on a rank."""

    elements: StageElements
    bytes: StateBytes
    version: int  # bytes of an older version of the trained weights
    fixed: int  # bytes that are held all the time, gradients as if each step had several micro-batches
    sums: float  # exposed seconds a step of the tensor axis's sums
    step: float  # the optimizer's seconds


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
    compute: float  # of forward and backward, without messages
    seconds: float  # with messages
    saved: int  # activations, for backward
    held: PassBytes


class DeferredBytes(NamedTuple):
    """Bytes of one micro-batch on a stage that computes weights' gradients apart, while those wait; and of the head, where it has it, until
    its backward and while they wait."""

    layers: int
    head_saved: int
    head_logits: int
    head: int


class StageCost(NamedTuple):
    """One kind of stage: its states, its passes, and what follows from both."""

    states: HeldStates
    passes: StagePasses
    messages: list[DataMessages]  # of the data axis
    saved_last: int  # bytes of activations that only the current micro-batch keeps
    logits: int  # bytes
    exposed: float  # seconds a step of the data axis and of the tensor axis's sums
    step: float  # the optimizer's seconds
    deferred: DeferredBytes | None = None  # None: its backwards are whole

    @property
    def fixed(self) -> int:
        """Bytes that are held all the time, gradients as if each step had several micro-batches."""
        return self.states.fixed + self.passes.held.workspace

    @property
    def temporary(self) -> int:
        """Bytes that the passes hold for a moment in addition."""
        return self.states.bytes.passes + self.passes.held.passes


def stage_costs(context: CostContext, layout: Layout, blocks: BlockCosts, kinds: tuple[StageKind, ...]) -> list[StageCost]:
    """The cost of each of some kinds of stage."""
    passed, synced = passes_of_kinds(context, layout, blocks, kinds), synced_states(context, layout, blocks, kinds)
    last, in_flight, head = last_passes(layout), logits_in_flight(layout), blocks.head
    costs = []
    for kind, passes, (states, messages) in zip(kinds, passed, synced, strict=True):
        forward, backward, heads = last * passes.forward, last * passes.backward, in_flight if kind.last else 0
        step = layout.micros * passes.compute
        exposed = sum([states.sums, *[each.exposed_seconds(forward, backward, step) for each in messages]])
        deferred = _deferred_bytes(blocks, kind) if defers_products(layout) else None
        saved, logits = heads * head.saved, heads * head.logits
        costs.append(StageCost(states, passes, messages, saved, logits, exposed, states.step, deferred))
    return costs


def defers_products(layout: Layout) -> bool:
    """Whether the stages of a layout compute weights' gradients apart, and hold until then what these need alone."""
    return layout.mesh.pp > 1 and layout.schedule.splits_backward and cost_model(layout.engine).defers_products


def _deferred_bytes(blocks: BlockCosts, kind: StageKind) -> DeferredBytes:
    head = blocks.head
    layers = kind.layers * blocks.layer.deferred + kind.first * blocks.first.deferred
    return DeferredBytes(layers, kind.last * head.saved, kind.last * head.logits, kind.last * head.deferred)


def passes_of_kinds(context: CostContext, layout: Layout, blocks: BlockCosts, kinds: tuple[StageKind, ...]) -> list[StagePasses]:
    """The passes of kinds of stage, cached by all that decides them: `blocks`, what of them a stage has, and what an engine holds for
    stages and their parts."""
    on_host = (layout.mesh, layout.shard_ranks) if layout.parallel.offload.parameters else None
    key = (id(blocks), kinds, layout.engine, layout.mesh.pp > 1, layout.chunks, layout.is_folded, on_host)
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
    for here, end in ((first, blocks.first), (last, blocks.head)):
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
        compute=forward + backward,
        seconds=forward + backward + message_forward + message_backward,
        saved=_saved_bytes(layout, blocks, kind),
        held=cost_model(layout.engine).pass_bytes(context, layout, blocks, kind),
    )


def synced_states(context: CostContext, layout: Layout, blocks: BlockCosts, kinds: tuple[StageKind, ...]) -> list[SyncedStates]:
    """The states of kinds of stage and their messages, cached by all that decides them; how gradients travel says how large their buckets
    are and whether messages overlap, and the mesh what of each weight a rank has."""
    parallel = layout.parallel
    key = (
        kinds,
        layout.mesh,
        layout.engine,
        layout.gradient_sync,
        parallel.zero,
        layout.shard_ranks,
        parallel.offload.optimizer,
        parallel.offload.parameters,
        parallel.sequence,
        parallel.gather,
        layout.micros if layout.offloads else layout.micros > 1,
        layout.delay is None,
    )
    found: list[SyncedStates] | None = context.synced.get(key)
    if found is None:
        found = context.synced[key] = [_synced_states(context, layout, blocks, kind) for kind in kinds]
    return found


def _synced_states(context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind) -> SyncedStates:
    states = held_states(context, layout, blocks, kind)
    messages = data_messages(context, layout, kind, states.elements, layout.gradient_sync)
    if layout.offloads:
        messages += cost_model(layout.engine).host_copies(context, layout, blocks, kind, states.elements)
    return SyncedStates(states, messages)


def held_states(context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind) -> HeldStates:
    """The states of a kind of stage, cached by all that decides them."""
    sync, parallel = layout.gradient_sync, layout.parallel
    key = (
        blocks.elements,
        layout.mesh,
        layout.engine,
        kind,
        parallel.zero,
        layout.shard_ranks,
        parallel.offload.optimizer,
        parallel.offload.parameters,
        parallel.overlap.data,
        parallel.sequence,
        parallel.bucket,
        parallel.gather,
        layout.micros > 1,
        sync.often,
        sync.updates,
        sync.every,
        sync.staleness,
        sync.inner,
        sync.servers,
        sync.rank,
        layout.delay is None,
    )
    found: HeldStates | None = context.held.get(key)
    if found is None:
        found = context.held[key] = _held_states(context, layout, blocks, kind)
    return found


def _held_states(context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind) -> HeldStates:
    elements = stage_elements(blocks, kind)
    sums = tp_gradient_sums.traffic_rows(context, layout, blocks, kind)
    engine = cost_model(layout.engine)
    states = engine.state_bytes(context, layout, blocks, kind, elements)
    states = states._replace(weights=states.weights + context.constants_of(kind))
    if context.run.checkpoint.in_background:
        states = states._replace(host=states.host._replace(snapshot=snapshot_bytes(context, layout, blocks, kind, elements)))
    return HeldStates(
        elements,
        states,
        version=context.widths.weight * elements.trained_parameters,
        fixed=states.weights + states.gradients + states.optimizer + states.buffers + context.device_context,
        sums=sum([row.exposed for row in (*sums, *engine.matrix_rows(context, layout, kind, None, 0))]),
        step=layout.gradient_sync.updates * engine.optimizer_seconds(context, layout, elements, _tensors(context, kind))
        + engine.compression_seconds(context, layout, kind)
        + engine.matrix_seconds(context, layout, kind, elements),
    )


def snapshot_bytes(context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind, elements: StageElements) -> int:
    """What a rank of a kind of stage copies for a save in the background: its part of a checkpoint, and of compression's errors."""
    errors = cost_model(layout.engine).saved_error_bytes(context, layout)
    return saved_part_bytes(context, layout, blocks, kind, elements) + errors // context.world


def stage_elements(blocks: BlockCosts, kind: StageKind) -> StageElements:
    """The parameters on a rank of a kind of stage."""
    layers, first, last = kind
    layer, head = blocks.layer, blocks.head
    dense, frozen, experts = layers * layer.dense, layers * layer.frozen, layers * layer.experts
    matrices, frozen_experts = layers * layer.matrices, layers * layer.frozen_experts
    for here, end in ((first, blocks.first), (last, head)):
        if here:
            dense += end.dense
            frozen += end.frozen
            experts += end.experts
            frozen_experts += end.frozen_experts
    if first and blocks.dense_layer:
        matrices += blocks.first.matrices
    if first and last:
        dense -= blocks.tied
        frozen -= blocks.tied if head.frozen else 0
    return StageElements(dense, frozen, experts, matrices, layers * layer.expert_matrices, frozen_experts)


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
    """Activations that a stage saves of one micro-batch: its layers', what the first stage has before them, and rotary positions once for
    each part."""
    saved = kind.layers * blocks.layer.saved + layout.chunks * blocks.saved_once
    return saved + (blocks.first.saved - blocks.saved_once if kind.first else 0)


def data_messages(context: CostContext, layout: Layout, kind: StageKind, held: StageElements, sync: GradientSync) -> list[DataMessages]:
    """Messages of the data axis: experts on several ranks are summed only over the ranks that hold the same ones."""
    wires = layout.wires
    if layout.mesh.ep == 1:
        groups = [(held.trained_parameters, held.frozen_parameters, "data", wires.data, layout.shard_ranks)]
    else:
        groups = [
            (held.trained_dense, held.frozen, "data", wires.data, layout.shard_ranks),
            (held.trained_experts, held.frozen_experts, "expert_copies", wires.expert_copies, layout.expert_shard_ranks),
        ]
    found: list[DataMessages] = []
    for elements, frozen, group, whole, ranks in groups:
        worker = layout.worker_ranks if group == "data" else max(1, layout.worker_ranks // layout.mesh.ep)
        together, apart = context.shard_wires(layout.mesh, group, whole, worker)
        engine, of_experts = cost_model(layout.engine), group == "expert_copies"
        route = sync._replace(inner=1, servers=0) if of_experts else sync
        shard, copies = context.shard_wires(layout.mesh, group, together, route.inner if route.inner > 1 else ranks)
        factors = engine.factors(context, layout, kind, expert=of_experts)
        single = context.single_link(together) if route.servers else None
        shards = dp.ZeroShards(elements, frozen, together, shard, copies, factors, single)
        found += dp.data_messages(shards, route, context.layers_of(kind))
        found += dp.averaging_messages(shards, apart, sync) if apart else []
        owners = shard if layout.parallel.zero and shard.size > 1 else together
        found += engine.matrix_messages(context, layout, kind, owners, sync, expert=of_experts)
    return found


def data_traffic(layout: Layout, cost: StageCost, data: int | None) -> list[TrafficRow]:
    """Traffic of the data axis on the data-parallel rank `data` of a stage; None: of the one that sends most."""
    servers, ranks = layout.gradient_sync.servers, layout.mesh.size("data")
    on_server = None if data is None else data in server_ranks(servers, ranks)
    last, passes = last_passes(layout), cost.passes
    step = layout.micros * passes.compute
    rows = [dp.traffic_row(each, last * passes.forward, last * passes.backward, step, on_server=on_server) for each in cost.messages]
    return [row for row in rows if row.times]


def _tensors(context: CostContext, kind: StageKind) -> int:
    """Tensors of parameters that a stage trains."""
    key = ("tensors", kind)
    if key not in context.memo:
        context.memo[key] = _trained_tensors(context, kind)
    count: int = context.memo[key]
    return count


def _trained_tensors(context: CostContext, kind: StageKind) -> int:
    table, dense = context.table, kind.first * context.dense_layers
    modules = table.modules * kind.last
    parts = (
        *((kind.first, table.embedding), (dense, table.dense_layer), (kind.layers + modules, table.layer), (kind.last, table.head)),
        *((modules, table.join), (modules, table.further)),
    )
    return sum([many * sum([not weight.frozen for weight in block_weights(ops)]) for many, ops in parts if many])
