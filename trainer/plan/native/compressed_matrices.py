"""Costs of PowerSGD on a rank of engine `native` (arXiv:1905.13727): which of a stage's weights it compresses, its memory and its time."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from ...models.ops.op_table import model_parameters
from ..axes.powersgd_factors import FactorElements, MatrixStack, compressed_stack, factor_elements
from ..axes.weight_slices import weight_shard
from ..costs.cost_context import CostContext
from ..costs.roofline import DeviceRates, memory_seconds, product_seconds
from ..layout.layout import Layout, StageKind
from .buckets import compression_rank

# The gradient, the error and the matrix that both add up to: read, read, written.
ADDED_TENSORS = 3
# Kernels in which a column of all equal matrices is made orthogonal to those before it, twice, and scaled.
COLUMN_KERNELS = 12


class StageMatrices(NamedTuple):
    """The compressed matrices of one weight of a stage, how often the stage has such a weight, whether expert ranks share it out."""

    stack: MatrixStack
    many: int
    expert: bool


def stage_matrices(context: CostContext, layout: Layout, kind: StageKind) -> tuple[StageMatrices, ...]:
    """The compressed weights of a rank of a kind of stage."""
    mesh = layout.mesh
    ranks = tuple(compression_rank(layout.parallel, mesh, expert=expert) for expert in (False, True))
    if not any(ranks):
        return ()
    key = ("compressed", kind, mesh.tp, mesh.ep, ranks)
    if key not in context.memo:
        ends, layer = (StageKind(0, kind.first, kind.last), 1), (StageKind(1, False, False), kind.layers)
        rows = (row._replace(many=many) for some, many in (ends, layer) for row in _matrices(context, layout, some, ranks))
        context.memo[key] = tuple(rows)
    found: tuple[StageMatrices, ...] = context.memo[key]
    return found


def _matrices(context: CostContext, layout: Layout, kind: StageKind, ranks: tuple[int, ...]) -> Iterator[StageMatrices]:
    mesh, multiple = layout.mesh, context.run.model.vocab_multiple
    for parameter in context.stage_parameters(kind):
        shard = weight_shard(parameter, context.table.sizes, mesh.tp, 0, vocab_multiple=multiple, ep=mesh.ep)
        stack = None if parameter.frozen else compressed_stack(shard.size, ranks[shard.expert])
        if stack:
            yield StageMatrices(stack, 1, shard.expert)


def stage_factors(context: CostContext, layout: Layout, kind: StageKind, *, expert: bool) -> FactorElements:
    """The compressed elements of a rank of a kind of stage and those of their factors, of experts that ranks share out or of other
    weights."""
    rank, found = layout.parallel.compress.rank, FactorElements()
    for each in stage_matrices(context, layout, kind):
        if each.expert == expert:
            found = found.plus(factor_elements(each.stack, rank).times(each.many))
    return found


def held_elements(context: CostContext, layout: Layout, kind: StageKind) -> int:
    """The elements that compression holds: an error for each of the gradient's, both factors."""
    both = (stage_factors(context, layout, kind, expert=expert) for expert in (False, True))
    return sum(sum(each) for each in both)


def saved_elements(context: CostContext, layout: Layout) -> int:
    """The elements of errors that a checkpoint keeps: one for each element of a weight that ranks compress."""
    mesh, sizes, found = layout.mesh, context.table.sizes, 0
    ranks = tuple(compression_rank(layout.parallel, mesh, expert=expert) for expert in (False, True))
    for parameter in model_parameters(context.table, range(context.run.model.layer_groups)) if any(ranks) else ():
        shard = weight_shard(parameter, sizes, mesh.tp, 0, vocab_multiple=context.run.model.vocab_multiple, ep=mesh.ep)
        if not parameter.frozen and compressed_stack(shard.size, ranks[shard.expert]):
            found += prod(parameter.shape(sizes))
    return found


def compression_seconds(context: CostContext, layout: Layout, kind: StageKind, rates: DeviceRates) -> float:
    """Seconds a step of compression on a rank of a kind of stage: errors are added, both factors made, the left ones orthogonalised, and
    both multiplied twice, for the error and for the gradient. Equal matrices are orthogonalised together."""
    rank, width, seconds = layout.parallel.compress.rank, context.widths.gradient, 0.0
    rows_of_equals: dict[tuple[int, int], int] = {}
    for (count, rows, columns), many, _ in stage_matrices(context, layout, kind):
        shapes = ((rows, rank, columns), (columns, rank, rows), (rows, columns, rank), (rows, columns, rank))
        products = sum(product_seconds(*shape, count, width, rates.linear, rates) for shape in shapes)
        seconds += many * (products + memory_seconds(ADDED_TENSORS * width * count * rows * columns, 1, rates))
        rows_of_equals[rows, columns] = rows_of_equals.get((rows, columns), 0) + many * count * rows
    for elements in rows_of_equals.values():  # each column reads those before it twice, and writes itself
        seconds += memory_seconds(4 * width * elements * rank * (rank + 1) / 2, COLUMN_KERNELS * rank, rates)
    return seconds
