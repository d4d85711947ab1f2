"""The rows of weights that a rank has at ZeRO 3 of engine `native`, as fully_shard cuts them: the first dim in equal chunks, rounded up."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from ...spec.run import Parallel
from ..axes.weight_slices import TensorCopies, WeightShard, weight_shard
from ..costs.cost_context import CostContext
from ..layout.layout import Layout, StageKind
from ..layout.mesh import Mesh


class WeightRows(NamedTuple):
    """A weight on a rank before sharding: its rows, the elements of one, which other ranks of the tensor axis hold it too, whether
    data-parallel ranks share it out, whether Muon steps it."""

    rows: int
    elements: int
    copies: TensorCopies
    expert: bool = False
    hidden_matrix: bool = False

    def on_rank(self, ranks: int, data: int | None) -> int:
        """The elements of one of `ranks` ranks; None: of the one with most."""
        chunk = -(-self.rows // ranks)
        own = chunk if data is None else min(chunk, max(0, self.rows - chunk * data))
        return own * self.elements


def gathers_once(parallel: Parallel) -> bool:
    """Whether weights are gathered once a step, not for every micro-batch: in a pipeline, unless the user says otherwise."""
    return parallel.gather == "step" or (parallel.gather == "auto" and parallel.pp > 1)


def rows_of_size(size: tuple[int, ...], copies: TensorCopies = "") -> WeightRows:
    """The rows of a weight of this size."""
    return WeightRows(size[0], prod(size[1:]), copies)


def padded_elements(size: tuple[int, ...], ranks: int) -> int:
    """The elements of a weight that travel: every rank's part is as large as the largest."""
    return ranks * rows_of_size(size).on_rank(ranks, None)


def stage_rows(context: CostContext, kind: StageKind, mesh: Mesh) -> tuple[tuple[WeightRows, int], ...]:
    """The trained weights of a rank of a kind of stage, and how often it has each."""
    key = ("native", kind, mesh.tp, mesh.ep)
    if key not in context.memo:
        ends, layer = (StageKind(0, kind.first, kind.last), 1), (StageKind(1, False, False), kind.layers)
        context.memo[key] = tuple((row, many) for some, many in (ends, layer) for row in _rows(context, some, mesh))
    found: tuple[tuple[WeightRows, int], ...] = context.memo[key]
    return found


def elements_on_rank(weight: WeightRows, layout: Layout, data: int | None) -> int:
    """Return the elements of a weight that the data-parallel rank `data` has at ZeRO 3; None: the rank with most. Experts are sharded over
    those of its ranks that hold the same ones."""
    mesh, group = layout.mesh, "expert_copies" if weight.expert else "data"
    ranks = layout.expert_shard_ranks if weight.expert else layout.shard_ranks
    number = data if data is None or not weight.expert else data // mesh.ep
    return weight.on_rank(ranks, None if number is None else mesh.shard_rank(number, ranks, group))


def _rows(context: CostContext, kind: StageKind, mesh: Mesh) -> Iterator[WeightRows]:
    for parameter in context.stage_parameters(kind):
        if not parameter.frozen:
            shard = weight_shard(parameter, context.table.sizes, mesh.tp, 0, vocab_multiple=context.run.model.vocab_multiple, ep=mesh.ep)
            yield rows_of_size(shard.size, _copies(mesh, shard))._replace(expert=shard.expert, hidden_matrix=shard.hidden_matrix)


def _copies(mesh: Mesh, shard: WeightShard) -> TensorCopies:
    if mesh.tp == 1:
        return ""
    return "shared" if shard.shared else "" if shard.is_split else "replicated"
