"""Engine `native` with weights in the host's memory at ZeRO 3 (trainer/engines/native/data_parallel/host_rows.py): what a rank holds there
and on its device, and what it copies. Rows are copied to the device for each gather, and gradients to the host as they are summed."""

from __future__ import annotations

from typing import NamedTuple

from ..axes.dp import DataMessages
from ..axes.weight_slices import weight_shard
from ..costs.cost_context import CostContext
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
    """Elements of a rank's rows: of all weights, of those of layers, of trained weights."""

    every: int
    layers: int
    trained: int


def held_rows(context: CostContext, kind: StageKind, mesh: Mesh) -> tuple[HeldRows, ...]:
    """The weights of a rank of a kind of stage."""
    key = ("native rows", kind, mesh.tp, mesh.ep)
    if key not in context.memo:
        context.memo[key] = tuple(
            HeldRows(
                rows_of_size(shard.size)._replace(expert=shard.expert),
                many,
                parameter.name.startswith(("layers.", "mtp.")),
                not parameter.frozen,
            )
            for some, many in ((StageKind(0, kind.first, kind.last), 1), (StageKind(1, False, False), kind.layers))
            for parameter in context.stage_parameters(some)
            if many
            for shard in [
                weight_shard(parameter, context.table.sizes, mesh.tp, 0, vocab_multiple=context.run.model.vocab_multiple, ep=mesh.ep)
            ]
        )
    found: tuple[HeldRows, ...] = context.memo[key]
    return found


def row_elements(context: CostContext, layout: Layout, kind: StageKind) -> RowElements:
    """The elements of the rows of a rank of a kind of stage."""
    sizes = [(each, each.many * each.elements(layout)) for each in held_rows(context, kind, layout.mesh)]
    return RowElements(
        every=sum(size for _, size in sizes),
        layers=sum(size for each, size in sizes if each.in_layer),
        trained=sum(size for each, size in sizes if each.is_trained),
    )


def rows_in_flight(context: CostContext, layout: Layout, kind: StageKind) -> int:
    """Return the bytes of a rank's own rows and gradients that are on its device: rows of a layer, or of the ends, while they are gathered,
    and gradients of two on their way."""
    own = row_elements(context, layout, kind)
    layers = max(1, context.layers_of(kind))
    most = max(own.every - own.layers, -(-own.layers // layers))
    trained = most if own.trained == own.every else -(-own.trained // layers)
    return most * context.widths.weight + 2 * trained * context.widths.gradient


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
    backward, which the host adds up; and `summed` elements that other axes sum on the device once a step, there and back."""
    own, width, rates = row_elements(context, layout, kind), context.widths, context.host_rates
    parts, micros = max(1, context.layers_of(kind)), layout.micros
    found = [copies(TO_DEVICE, own.every * width.weight, parts, micros, rates, forward=True, overlap=True)]
    if own.layers:
        found.append(copies(TO_DEVICE, own.layers * width.weight, parts, micros, rates, overlap=True))
    gradients = copies(TO_HOST, own.trained * width.gradient, parts, micros, rates, overlap=True)
    if rates:
        added = own.trained * (width.gradient + (2 * micros - 1) / micros * MASTER_BYTES) / rates.memory
        seconds = max(gradients.seconds, added)
        gradients = gradients._replace(seconds=seconds, least=max(gradients.least, seconds / parts))
    found.append(gradients)
    if summed:
        found += [copies(verb, summed * MASTER_BYTES, 1, 1, rates) for verb in (TO_DEVICE, TO_HOST)]
    return found
