"""Engine `native` with weights in the host's memory at ZeRO 3 (trainer/engines/native/data_parallel/host_rows.py): what a rank holds there
and on its device, and what it copies. Rows are copied to the device for each gather, and gradients to the host as they are summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...models.ops.op_table import Parameter
from ..axes.dp import DataMessages
from ..axes.weight_slices import weight_shard
from ..costs.block_costs import BlockCosts
from ..costs.cost_context import CostContext
from ..costs.number_or_array import larger
from ..costs.offload import TO_DEVICE, TO_HOST, HostBytes, HostWork, copies, pinned_bytes
from ..costs.precision import MASTER_BYTES, average_bytes
from ..layout.layout import Layout, StageKind
from ..layout.mesh import Mesh
from .dim0_shards import WeightRows, rows_of_size
from .optimizer_step import AT_HAND

GRADIENTS_AT_ONCE = 2**27  # elements of gradients that go to the host through one buffer before they are added to their sums


class HeldRows(NamedTuple):
    """A weight on a rank before sharding, how often the rank has it, whether it is of a layer, and whether it is trained."""

    weight: WeightRows
    many: int
    in_layer: bool
    is_trained: bool

    def elements(self, layout: Layout) -> int:
        """The elements of its rows on the rank with most: so many travel."""
        ranks = layout.expert_shard_ranks if self.weight.expert else layout.shard_ranks
        return self.weight.on_rank(ranks, None)


class RowElements(NamedTuple):
    """Elements of weights on a rank of a kind of stage: of all, of those of layers, and those of either that are trained."""

    every: int
    layers: int
    trained: int
    trained_layers: int

    @property
    def ends(self) -> int:
        """Those of the ends of the model."""
        return self.every - self.layers

    @property
    def trained_ends(self) -> int:
        """Those of the ends that are trained."""
        return self.trained - self.trained_layers


def held_rows(context: CostContext, kind: StageKind, mesh: Mesh) -> tuple[HeldRows, ...]:
    """The weights of a rank of a kind of stage."""
    key = ("native rows", kind, mesh.tp, mesh.ep)
    if key not in context.memo:
        ends, layer = (StageKind(0, kind.first, kind.last), 1), (StageKind(1, False, False), kind.layers)
        context.memo[key] = tuple(
            _held_rows(context, parameter, mesh, many)
            for some, many in (ends, layer)
            if many
            for parameter in context.stage_parameters(some)
        )
    found: tuple[HeldRows, ...] = context.memo[key]
    return found


def _held_rows(context: CostContext, parameter: Parameter, mesh: Mesh, many: int) -> HeldRows:
    shard = weight_shard(parameter, context.table.sizes, mesh.tp, 0, vocab_multiple=context.run.model.vocab_multiple, ep=mesh.ep)
    rows = rows_of_size(shard.size)._replace(expert=shard.expert)
    return HeldRows(rows, many, parameter.name.startswith(("layers.", "mtp.")), not parameter.frozen)


def row_elements(context: CostContext, layout: Layout, kind: StageKind) -> RowElements:
    """The elements of the rows that a rank has of its weights."""
    return _elements(context, kind, layout.mesh, lambda each: each.elements(layout))


def _elements(context: CostContext, kind: StageKind, mesh: Mesh, of: Callable[[HeldRows], int]) -> RowElements:
    sizes = [(each, each.many * of(each)) for each in held_rows(context, kind, mesh)]
    return RowElements(
        every=sum(size for _, size in sizes),
        layers=sum(size for each, size in sizes if each.in_layer),
        trained=sum(size for each, size in sizes if each.is_trained),
        trained_layers=sum(size for each, size in sizes if each.is_trained and each.in_layer),
    )


def gathered_ends(context: CostContext, layout: Layout, kind: StageKind) -> int:
    """Return the bytes of the ends of the model, which stay gathered from forward to backward."""
    return _elements(context, kind, layout.mesh, lambda each: each.weight.on_rank(1, None)).ends * context.widths.weight


def host_row_pass_bytes(context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind) -> int:
    """Return the most bytes that the passes of a micro-batch hold beside what they save and the gathered ends. In the head: the next layer
    that is gathered. In the layers, on top of the head's gradients: two that are gathered, and another's gradients as ranks sum them, or
    one, and another's gradients as they are taken. At the end: the ends' gradients as they are taken."""
    weight, gradient = context.widths.weight, context.widths.gradient
    whole, own = _elements(context, kind, layout.mesh, lambda each: each.weight.on_rank(1, None)), row_elements(context, layout, kind)
    many, head = max(1, context.layers_of(kind)), blocks.head
    layer = max(blocks.layer.dense + blocks.layer.experts, blocks.dense_layer.dense * kind.first if blocks.dense_layer else 0)
    layer = max(layer, kind.last * blocks.module)
    trained = layer if whole.trained_layers == whole.layers else -(-whole.trained_layers // many)
    rows, sums = -(-own.layers // many) * weight, -(-own.trained_layers // many) * gradient
    ended, saved = (head.saved + head.logits) * kind.last, kind.layers * blocks.layer.saved + blocks.first.saved * kind.first
    embedding = (blocks.embedding.dense - blocks.embedding.frozen) * (kind.first and not blocks.tied_gradient)
    waits = (whole.trained_ends - embedding) * weight * kind.last
    computing = blocks.layer.temporary + 2 * layer * weight + trained * gradient
    in_layers = larger(computing, layer * weight + _taken_bytes(context, layout, trained, -(-own.trained_layers // many))) + rows + sums
    in_layers += waits - ended
    in_ends = _taken_bytes(context, layout, whole.trained_ends, own.trained_ends) - whole.ends * weight
    in_head = head.temporary * kind.last + layer * weight + rows
    return larger(larger(in_head, in_layers), in_ends - ended - saved)


def _taken_bytes(context: CostContext, layout: Layout, whole: int, own: int) -> int:
    """Return the bytes of gradients while fully_shard takes them: as they were made beside what ranks sum, then this beside the rank's sum,
    which one rank alone divides in addition."""
    made, summed = context.widths.weight, context.widths.gradient
    return whole * summed + max(whole * made, own * summed * (2 if layout.shard_ranks == 1 else 1))


def host_row_bytes(context: CostContext, layout: Layout, kind: StageKind, optimizer: int) -> HostBytes:
    """Return what is on the host beside `optimizer` bytes of states: each weight's rows, in pinned memory of their own, which are stepped
    where forward's type is float32; else float32 rows; float32 sums of gradients; and what gradients go through."""
    size = pinned_bytes if context.run.cluster.device.kind == "cuda" else int
    width, trained = context.widths, row_elements(context, layout, kind).trained
    masters = 0 if width.weight == MASTER_BYTES else MASTER_BYTES * trained
    rows = held_rows(context, kind, layout.mesh)
    return HostBytes(
        weights=sum(each.many * size(each.elements(layout) * width.weight) for each in rows),
        gradients=MASTER_BYTES * trained,
        optimizer=optimizer + masters,
        buffers=AT_HAND * size(min(GRADIENTS_AT_ONCE, trained) * width.gradient),
    )


def host_row_work(context: CostContext, stepped: int) -> HostWork:
    """Return the step of a rank's `stepped` elements: the norm and the step read float32 gradients, and narrow rows are written. Nothing is
    copied."""
    width, average = context.widths, average_bytes(context.run.optim)
    rows = width.weight if width.weight < MASTER_BYTES else 0
    return HostWork(stepped * (2 * MASTER_BYTES + 2 * (MASTER_BYTES + context.states) + average + rows))


def host_row_copies(context: CostContext, layout: Layout, kind: StageKind, summed: int) -> list[DataMessages]:
    """Return the copies of a step: each micro-batch's rows for forward, those of layers again for backward, and its gradients under
    backward, which the host adds up, those of the last buffers after it; and `summed` elements that other axes sum on the device once a
    step, there and back."""
    own, width, rates = row_elements(context, layout, kind), context.widths, context.host_rates
    parts, micros = max(1, context.layers_of(kind)), layout.micros
    found = [copies(TO_DEVICE, own.every * width.weight, parts, micros, rates, forward=True, overlap=True)]
    if own.layers:
        found.append(copies(TO_DEVICE, own.layers * width.weight, parts, micros, rates, overlap=True))
    gradients = copies(TO_HOST, own.trained * width.gradient, parts, micros, rates, overlap=True)
    if rates:
        added = own.trained * (width.gradient + (2 * micros - 1) / micros * MASTER_BYTES) / rates.memory
        left = min(AT_HAND * min(GRADIENTS_AT_ONCE, own.trained), micros * own.trained)
        added_last = left * (width.gradient + (2 if micros > 1 else 1) * MASTER_BYTES) / rates.memory
        seconds = max(gradients.seconds, added)
        gradients = gradients._replace(seconds=seconds, least=max(gradients.least, seconds / parts, min(seconds, added_last / micros)))
    found.append(gradients)
    if summed:
        found += [copies(verb, summed * MASTER_BYTES, 1, 1, rates) for verb in (TO_DEVICE, TO_HOST)]
    return found
