"""Memory and messages of engine `native`, where they differ from the papers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...spec.run import Parallel, Run
from ..axes import dp
from ..axes.powersgd_factors import FactorElements, compressed_stack, factor_elements
from ..axes.weight_slices import TensorCopies, WeightShard
from ..costs.block_costs import BlockCosts
from ..costs.control_message import ControlMessage, counts_of_routing, further_losses, routing_messages
from ..costs.cost_context import CostContext
from ..costs.cost_model import (
    CostModel,
    PassBytes,
    StageElements,
    StateBytes,
    elements_to_step,
    matrices_to_step,
    sharded_elements,
)
from ..costs.muon import MUON, data_place, element_bytes, sent_parts, step_bytes
from ..costs.number_or_array import larger
from ..costs.offload import GradientCopies, HostBytes, HostWork
from ..costs.precision import MASTER_BYTES, Widths, average_bytes, has_moments, scale_share, widths
from ..costs.stage_temporary_bytes import stage_temporary_bytes
from ..costs.traffic_term import TrafficTerm
from ..layout.gradient_routes import inner_ranks, server_count, server_ranks
from ..layout.layout import Layout, StageKind
from ..layout.mesh import Mesh
from ..layout.schedule_of_run import delay_of
from ..layout.workers import worker_count
from .buckets import Bucket, compression_rank, gradient_buckets, sharing_ranks
from .compressed_matrices import compression_seconds, held_elements, saved_elements, stage_factors
from .dim0_shards import elements_on_rank, gathers_once, rows_of_size, stage_rows
from .host_rows import host_row_copies, host_row_pass_bytes, host_row_work
from .moment_blocks import scale_bytes
from .optimizer_step import bucket_host_bytes, bucket_work, cast_bytes, rounded_step_moves, step_moves, steps_in_one_kernel
from .posted_receives import receives_ahead
from .stage3 import AVERAGED, COPIED_SHARD, is_sharded, outer_bytes, stage3_bytes, stage3_terms, stepped_width, steps_alone

FLOAT64_BYTES, INT64_BYTES = 8, 8


class NativeCosts(CostModel):
    """Costs of flat buckets of weights, as counted on live tensors and messages."""

    defers_products = True
    simulates_uneven = True
    hides_messages = False

    def gradient_path(self, context: CostContext, parallel: Parallel, micros: int) -> dp.GradientSync:
        """At ZeRO 2 gradients travel at every micro-batch, in a pipeline too; at ZeRO 3 as often as weights are gathered. Stepped weights
        are gathered before the next step begins."""
        path = super().gradient_path(context, parallel, micros)
        if parallel.zero == 3:
            once = gathers_once(parallel)
            return path._replace(often=True, micros=1 if once else micros, reused=context.parameters if once else 0)
        rank = parallel.compress.rank if parallel.compress.name == "powersgd" and not parallel.zero else 0
        return path._replace(often=parallel.zero == 2, gather_hides=False, copies_hide=False, rank=rank)

    def state_bytes(self, context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind, held: StageElements) -> StateBytes:
        """Float32 weights are stepped where they are; others have a float32 copy of this rank's shard. At ZeRO 1 a rank has all gradients,
        and the sum of its shard beside them in the step, both once more for each step whose sum is under way (parallel.staleness); at
        ZeRO 2 its shard, two buckets of one micro-batch, and all gradients that other axes sum first."""
        parallel, width = layout.parallel, context.widths
        zero = parallel.zero if layout.shard_ranks > 1 else 0
        if is_sharded(layout):
            return stage3_bytes(context, layout, blocks, kind, held)
        whole, stepped = held.trained_parameters, elements_to_step(layout, held)
        often, master = zero == 2, MASTER_BYTES if width.weight < MASTER_BYTES else 0
        bucket = min(parallel.bucket, whole)
        late = self._late_elements(context, layout, blocks, kind) if often else 0
        scattered = _scattered_elements(layout, held) if zero == 1 else 0
        on_host = parallel.offload.optimizer
        optimizer = (MASTER_BYTES if on_host else master) + context.states + outer_bytes(layout)
        optimizer = optimizer * stepped - context.spared * matrices_to_step(layout, held) + scale_bytes(context, layout, kind)
        aside = layout.gradient_sync.staleness * (whole + scattered)
        return StateBytes(
            weights=width.weight * (held.dense + held.experts),
            gradients=width.gradient * (stepped + late - late // layout.shard_ranks if often else whole + aside),
            optimizer=0 if on_host else optimizer,
            buffers=width.gradient * (held_elements(context, layout, kind) + _route_elements(layout, whole, stepped)),
            passes=2 * bucket * width.gradient if often else 0,
            step=scattered * width.gradient
            + (0 if on_host else cast_bytes(context.run, bucket, stepped, casts=width.gradient < MASTER_BYTES))
            + step_bytes(context, layout, kind, width.gradient),
            host=bucket_host_bytes(context, optimizer, stepped, width.gradient) if on_host else HostBytes(),
        )

    def factors(self, context: CostContext, layout: Layout, kind: StageKind, *, expert: bool) -> FactorElements:
        return stage_factors(context, layout, kind, expert=expert)

    def pass_bytes(self, context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind) -> PassBytes:
        passes = stage_temporary_bytes(context, blocks, kind)
        if layout.parallel.offload.parameters and is_sharded(layout):
            passes = larger(passes, host_row_pass_bytes(context, layout, blocks, kind))
        return PassBytes(workspace=_message_bytes(layout, blocks), passes=passes)

    def _late_elements(self, context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind) -> int:
        """Return the elements of weights whose gradients another axis sums before the data axis does."""
        copies: tuple[TensorCopies, ...] = ("shared", "replicated") if layout.parallel.sequence and layout.mesh.tp > 1 else ("shared",)
        tied = blocks.tied_gradient if layout.mesh.pp > 1 and kind.first != kind.last else 0
        return tied + sum(super(NativeCosts, self).summed_elements(context, layout, blocks, kind, each, None) for each in copies)

    def summed_elements(
        self, context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind, copies: TensorCopies, data: int | None
    ) -> int:
        """Whole gradients, which the data axis sums later; at ZeRO 3 those of this rank's rows."""
        if not is_sharded(layout):
            return super().summed_elements(context, layout, blocks, kind, copies, data)
        rows = stage_rows(context, kind, layout.mesh)
        return sum(many * elements_on_rank(each, layout, data) for each, many in rows if each.copies == copies)

    def summed_width(self, context: CostContext, layout: Layout) -> int:
        return stepped_width(context, layout)

    def tied_elements(self, context: CostContext, layout: Layout, blocks: BlockCosts, data: int | None) -> int:
        if not is_sharded(layout):
            return blocks.tied_gradient
        hidden = context.table.sizes["hidden"]
        place = None if data is None else layout.mesh.shard_rank(data, layout.shard_ranks)
        return rows_of_size((blocks.tied_gradient // hidden, hidden)).on_rank(layout.shard_ranks, place)

    def saved_error_bytes(self, context: CostContext, layout: Layout) -> int:
        return context.widths.gradient * saved_elements(context, layout)

    def compression_seconds(self, context: CostContext, layout: Layout, kind: StageKind) -> float:
        return compression_seconds(context, layout, kind, context.own_rates) if context.own_rates else 0.0

    def step_seconds(self, context: CostContext, layout: Layout, held: StageElements, tensors: int) -> float:
        """The norm reads the gradients, and Adam them, its states and its weights (`step_moves`). Where older versions stay, all weights
        are copied first."""
        if context.own_rates is None:
            return 0.0
        width = context.widths
        copied = 2 * width.weight * held.trained_parameters if layout.delay else 0
        if layout.parallel.offload.parameters:
            return self.host_seconds(context, layout, held)
        if layout.parallel.offload.optimizer:
            normed = elements_to_step(layout, held) * stepped_width(context, layout) / context.own_rates.memory
            return normed + self.host_seconds(context, layout, held)
        one_kernel = steps_in_one_kernel(context.run)
        # fully_shard's weights are float32, and cast when they are gathered
        weight, gradient = (MASTER_BYTES, MASTER_BYTES) if is_sharded(layout) else (width.weight, width.gradient)
        rounded = rounded_step_moves(context.run) if has_moments(context.run.optim) else None
        average, scales = average_bytes(context.run.optim), scale_share(context.run.optim)
        each: float = rounded or step_moves(weight, gradient, context.states - average + scales, one_kernel=one_kernel)
        each += 3 * average  # the stepped weight and the average are read, and this is written
        if steps_alone(layout):  # the mean and the narrow copy, and what the step together reads and writes beside them
            each += (2 * MASTER_BYTES + weight + 3 * outer_bytes(layout)) / layout.gradient_sync.every
        moved = elements_to_step(layout, held) * each
        if context.spared:  # of Adam's two states the second isn't there; an update is written, sent and read instead
            moved += matrices_to_step(layout, held) * 2 * (element_bytes(context.run) - context.spared)
        return (moved + copied) / context.own_rates.memory

    def host_step(self, context: CostContext, layout: Layout, held: StageElements) -> HostWork:
        """Pieces of buckets are copied, stepped and copied back in turn; rows that are on the host with their gradients are not."""
        if layout.parallel.offload.parameters:
            return host_row_work(context, elements_to_step(layout, held))
        return bucket_work(context, elements_to_step(layout, held), stepped_width(context, layout))

    def host_copies(
        self, context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind, held: StageElements
    ) -> list[dp.DataMessages]:
        """With offloaded parameters rows and gradients travel layer by layer (host_rows.py)."""
        if not layout.parallel.offload.parameters:
            return super().host_copies(context, layout, blocks, kind, held)
        sums: tuple[TensorCopies, ...] = ("shared", "replicated") if layout.parallel.sequence else ("shared",)
        summed = sum(self.summed_elements(context, layout, blocks, kind, each, None) for each in sums) if layout.mesh.tp > 1 else 0
        tied = self.tied_elements(context, layout, blocks, None) if layout.mesh.pp > 1 and kind.first != kind.last else 0
        return host_row_copies(context, layout, kind, summed + tied)

    def gradient_copies(self, context: CostContext, layout: Layout) -> Iterator[GradientCopies]:
        """None: the step copies the sums of gradients."""
        return iter(())

    def traffic_terms(self, run: Run, mesh: Mesh, shards: Sequence[WeightShard], data: int) -> Iterator[TrafficTerm]:
        """Buckets are padded to equal parts where ZeRO shards them, parameter servers own parts, or ranks of a node sum them."""
        if run.optim.name == MUON:
            yield from _matrix_terms(run, mesh, shards, data)
        width, micros = widths(run), run.train.batch // (mesh.dp * run.train.microbatch)
        updates = _updates(run, micros)
        workers, every = worker_count(run.parallel, mesh, run.cluster.gpus), run.parallel.sync.every
        if run.parallel.zero == 3 and sharing_ranks(run, mesh, expert=False)[0] > 1:
            yield from stage3_terms(run, mesh, shards, 1 if gathers_once(run.parallel) else micros, averages=workers > 1)
            return
        inner, servers = inner_ranks(run.parallel, mesh, run.cluster.gpus), server_count(run.parallel, mesh)
        for bucket in gradient_buckets(run, mesh, shards):
            ranks, copies = sharing_ranks(run, mesh, expert=bucket.kind.expert)
            says = f"a bucket of {len(bucket.names)} gradients, padded to {bucket.elements:,} elements"
            if ranks > 1:
                rounds = micros if run.parallel.zero == 2 and not bucket.kind.late else updates
                yield TrafficTerm(verb="reduce_scatter", bytes=rounds * bucket.elements * width.gradient, says=says)
                yield TrafficTerm(verb="all_gather", bytes=updates * bucket.elements * width.weight, says="its stepped weights")
            if servers:
                sent = _sent_to_or_by_server(servers, copies, width, is_server=data in server_ranks(servers, copies))
                yield TrafficTerm(verb="send", bytes=updates * bucket.elements // servers * sent, says=says)
            elif inner > 1:
                yield TrafficTerm(verb="reduce_scatter", bytes=updates * bucket.elements * width.gradient, says=says)
                yield TrafficTerm(verb="all_reduce", bytes=updates * (bucket.elements // inner) * width.gradient, says=says)
                yield TrafficTerm(verb="all_gather", bytes=updates * bucket.elements * width.gradient, says=says)
            elif bucket.kind.compressed:
                yield from _factor_terms(run, mesh, bucket, {each.name: each.size for each in shards}, width.gradient)
            elif copies > 1:
                shard = f"{COPIED_SHARD}, of " if ranks > 1 else ""
                yield TrafficTerm(verb="all_reduce", bytes=updates * (bucket.elements // ranks) * width.gradient, says=shard + says)
            if workers > 1:
                yield TrafficTerm(verb="all_reduce", bytes=bucket.elements // ranks * MASTER_BYTES, every=every, says=AVERAGED)
            if workers > 1 and ranks > 1:
                yield TrafficTerm(verb="all_gather", bytes=bucket.elements * width.weight, every=every, says="its averaged weights")

    def control_messages(self, run: Run, mesh: Mesh, shards: Sequence[WeightShard], layers: int) -> tuple[ControlMessage, ...] | None:
        """One message a step sums the loss, the squares of gradients and the counts of routing over all ranks. Without a flush the ranks
        of a stage sum theirs before each update."""
        rows: list[tuple[str, int, int, str]] = []
        is_parallel, counts, further = int(mesh.world > 1), counts_of_routing(run), further_losses(run)
        beside = ", further losses and figures of pairs" if run.data.has_preferences else ", further losses"
        says = "loss, squares of gradients" + beside * bool(further) + ", counts of routing" * bool(counts)
        rows.append(("all_reduce", (2 + further + counts) * FLOAT64_BYTES, is_parallel, says))
        if delay_of(run.parallel):
            updates = _updates(run, run.train.batch // (mesh.dp * run.train.microbatch))
            rows.append(("all_reduce", FLOAT64_BYTES, updates * (mesh.world > mesh.pp), "squares of a stage's gradients"))
        if (workers := worker_count(run.parallel, mesh, run.cluster.gpus)) > 1:
            rows.append(("all_reduce", FLOAT64_BYTES, int(mesh.world > workers), "squares of a worker's gradients"))
        if run.data.documents:
            rows.append(("all_reduce", INT64_BYTES, is_parallel, "label count"))
        own = (ControlMessage(verb=verb, payload=payload, count=count, says=says) for verb, payload, count, says in rows if count)
        return (*own, *routing_messages(run, mesh, layers))


def _matrix_terms(run: Run, mesh: Mesh, shards: Sequence[WeightShard], data: int) -> Iterator[TrafficTerm]:
    """What a rank sends of the matrices that Muon steps where ZeRO shards them: its part of each bucket, or its rows of each weight."""
    for expert in (False, True):
        ranks = sharing_ranks(run, mesh, expert=expert)[0]
        some = [each for each in shards if each.expert == expert and each.hidden_matrix]
        if ranks == 1 or not some:
            continue
        place = data_place(mesh, data, ranks, expert=expert)
        if run.parallel.zero == 3:
            held = sum(rows_of_size(each.size).on_rank(ranks, place) for each in some)
        else:
            buckets = [each for each in gradient_buckets(run, mesh, shards) if each.kind.matrices and each.kind.expert == expert]
            held = sum(each.filled(ranks, place) for each in buckets)
        yield from sent_parts(run, some, place, ranks, held, expert=expert)


def _sent_to_or_by_server(servers: int, ranks: int, width: Widths, *, is_server: bool) -> int:
    """Return the bytes that a rank sends for an element of each server's part: gradients to every server but itself, and, if it is one,
    weights to all others."""
    return (servers - is_server) * width.gradient + is_server * (ranks - 1) * width.weight


def _message_bytes(layout: Layout, blocks: BlockCosts) -> int:
    """Return the bytes of a stage's messages: one that it uses, and those whose receives are posted."""
    return (1 + receives_ahead(layout.chunks)) * blocks.stream if layout.mesh.pp > 1 else 0


def _factor_terms(run: Run, mesh: Mesh, bucket: Bucket, sizes: Mapping[str, tuple[int, ...]], width: int) -> Iterator[TrafficTerm]:
    """The two messages of a bucket whose gradients travel as two factors."""
    rank, elements = compression_rank(run.parallel, mesh, expert=bucket.kind.expert), FactorElements()
    for name in bucket.names:
        stack = compressed_stack(sizes[name], rank)
        assert stack is not None  # else it is in another bucket
        elements = elements.plus(factor_elements(stack, rank))
    for side, sent in (("left", elements.left), ("right", elements.right)):
        says = f"the {side} factors of a bucket of {len(bucket.names)} gradients, of {elements.matrices:,} elements"
        yield TrafficTerm(verb="all_reduce", bytes=sent * width, says=says)


def _updates(run: Run, micros: int) -> int:
    """The updates of the weights in a step of so many micro-batches."""
    delay = delay_of(run.parallel)
    return delay.updates(micros) if delay else 1


def _scattered_elements(layout: Layout, held: StageElements) -> int:
    """Return the elements of a rank's shard of gradients that it sums with other ranks; no other has some experts."""
    experts = held.trained_experts if layout.expert_shard_ranks > 1 else 0
    return sharded_elements(layout, held.trained_dense, experts)


def _route_elements(layout: Layout, whole: int, stepped: int) -> int:
    """Return the gradients that a rank holds beside its own while they are summed: as a parameter server those of its part of all other
    ranks, of a bucket or, where they are used late, of each step under way; or the part that it sums for its node."""
    sync = layout.gradient_sync
    if sync.servers:
        part = (1 + sync.staleness) * stepped if sync.staleness else -(-min(sync.bucket, whole) // sync.servers)
        return (layout.mesh.size("data") - 1) * part
    return -(-whole // sync.inner) if sync.inner > 1 else 0
