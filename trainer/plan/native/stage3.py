"""Memory and messages of engine `native` at ZeRO 3, where fully_shard gathers this rank's rows of each weight with those of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...spec.run import Run
from ..axes.weight_slices import WeightShard
from ..costs.block_costs import BlockCosts
from ..costs.cost_context import CostContext
from ..costs.cost_model import StageElements, StateBytes, sharded_elements
from ..costs.muon import step_bytes
from ..costs.offload import HostBytes
from ..costs.precision import MASTER_BYTES, widths
from ..costs.traffic_term import TrafficTerm
from ..layout.layout import Layout, StageKind
from ..layout.mesh import Mesh
from ..layout.workers import outer_state_bytes
from .buckets import sharing_ranks
from .dim0_shards import gathers_once, padded_elements, stage_rows
from .host_rows import gathered_ends, host_row_bytes
from .moment_blocks import scale_bytes
from .optimizer_step import bucket_host_bytes, cast_bytes

COPIED_SHARD = "gradients of the shard, which other ranks own too"
AVERAGED = "the weights that workers average"


def is_sharded(layout: Layout) -> bool:
    """Whether fully_shard gathers the weights: ranks share them out, or a rank's are in its host's memory."""
    return layout.parallel.zero == 3 and (layout.shard_ranks > 1 or layout.parallel.offload.parameters)


def steps_alone(layout: Layout) -> bool:
    """Whether several workers step alone."""
    return layout.worker_ranks < layout.mesh.size("data")


def outer_bytes(layout: Layout) -> int:
    """Bytes of an element of what workers keep for the step that they take together."""
    return outer_state_bytes(layout.parallel) if steps_alone(layout) else 0


def stepped_width(context: CostContext, layout: Layout) -> int:
    """Bytes of an element of the gradients that the optimizer steps with, and that the tensor axis and the ends of a pipeline sum:
    fully_shard keeps them in float32."""
    return MASTER_BYTES if is_sharded(layout) else context.widths.gradient


def stage3_bytes(context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind, held: StageElements) -> StateBytes:
    """fully_shard keeps float32 weights and gradients of this rank's rows; with an offloaded optimizer these weights are as wide as those
    that are gathered, and the float32 ones are on the host; with offloaded parameters all are (host_rows.py). Gathered are the ends of the
    model and two layers, with the gradients of one, or, where weights are gathered once a step, all weights and all gradients."""
    width = context.widths
    rows = [
        (each, many * each.on_rank(layout.expert_shard_ranks if each.expert else layout.shard_ranks, None))
        for each, many in stage_rows(context, kind, layout.mesh)
    ]
    stepped, matrices = sum(own for _, own in rows), sum(own for each, own in rows if each.hidden_matrix)
    own = stepped + sharded_elements(layout, held.frozen, held.frozen_experts)
    if gathers_once(layout.parallel):
        gathered = width.weight * (held.dense + held.experts) + width.gradient * held.trained_parameters
    else:
        layer, dense = blocks.layer.dense + blocks.layer.experts, blocks.dense_layer.dense * kind.first if blocks.dense_layer else 0
        modules = kind.last * context.table.modules
        ends = held.dense + held.experts - kind.layers * layer - context.dense_layers * dense - modules * blocks.module
        layer = max(layer, dense, kind.last * blocks.module)
        gathered = (ends + 2 * layer) * width.weight + max(ends, layer) * (width.weight + width.gradient)
    if layout.parallel.offload.parameters:
        states = (context.states + outer_bytes(layout)) * stepped + scale_bytes(context, layout, kind)
        return StateBytes(0, 0, 0, gathered_ends(context, layout, kind), host=host_row_bytes(context, layout, kind, states))
    on_host = layout.parallel.offload.optimizer
    weights = (width.weight if on_host else MASTER_BYTES) * own
    optimizer = ((MASTER_BYTES if on_host else 0) + context.states + outer_bytes(layout)) * stepped
    optimizer += scale_bytes(context, layout, kind) - context.spared * matrices
    host = bucket_host_bytes(context, optimizer, stepped, MASTER_BYTES) if on_host else HostBytes()
    return StateBytes(
        weights=weights,
        gradients=MASTER_BYTES * stepped,
        optimizer=0 if on_host else optimizer,
        buffers=gathered,
        step=(min(layout.parallel.bucket, stepped) * MASTER_BYTES if steps_alone(layout) else 0)
        + (0 if on_host else cast_bytes(context.run, 0, stepped, casts=False))
        + step_bytes(context, layout, kind, MASTER_BYTES),
        host=host,
    )


def stage3_terms(run: Run, mesh: Mesh, shards: Sequence[WeightShard], rounds: int, *, averages: bool) -> Iterator[TrafficTerm]:
    """fully_shard gathers each layer for forward and for backward, the ends of the model once for both; it pads each weight's rows. Owners
    of the same rows sum them after the last micro-batch."""
    width = widths(run)
    often = f"at each of {rounds} micro-batches" if rounds > 1 else "once a step"
    for expert in sorted({each.expert for each in shards}):
        ranks, copies = sharing_ranks(run, mesh, expert=expert)
        some = [each for each in shards if each.expert == expert]
        sizes = [
            (padded_elements(each.size, ranks), each.name.startswith(("layers.", "mtp.")), run.model.is_trained(each.name)) for each in some
        ]
        layers, whole = sum(size for size, layer, _ in sizes if layer), sum(size for size, *_ in sizes)
        trained = sum(size for size, _, is_trained in sizes if is_trained)
        again = 0 if gathers_once(run.parallel) else layers
        kind = "experts" if expert else "weights"
        if ranks > 1:
            says = f"{kind}, {often}" + ", those of layers again in backward" * bool(again)
            yield TrafficTerm(verb="all_gather", bytes=rounds * (whole + again) * width.weight, says=says)
            says = f"gradients of {kind}, {often}, each padded to equal rows"
            yield TrafficTerm(verb="reduce_scatter", bytes=rounds * trained * width.gradient, says=says)
        if copies > 1:
            yield TrafficTerm(verb="all_reduce", bytes=trained // ranks * width.gradient, says=f"{COPIED_SHARD}, once a step")
        if averages:  # a rank may have fewer rows than the first
            yield TrafficTerm(
                verb="all_reduce", bytes=0, most=trained // ranks * MASTER_BYTES, every=run.parallel.sync.every, says=AVERAGED
            )
