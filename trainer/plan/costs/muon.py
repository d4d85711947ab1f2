"""Costs of Muon on a rank: the matrices that it orthogonalises, their memory, their messages, their time.

The update of a matrix is needed whole. Ranks that step parts of it (ZeRO) send these to its owner and get theirs back, so do
tensor-parallel ranks with their blocks; where each data-parallel rank steps all (ZeRO 0), the owners' updates are gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from ...models.ops.op_table import Parameter, model_parameters
from ...spec.run import Run
from ..axes import dp
from ..axes.collectives import Wire, collective_cost
from ..axes.muon_matrices import dealt, matrices_of, matrix_order, name_in_layer
from ..axes.traffic_row import TrafficRow
from ..axes.weight_slices import WeightShard, weight_shard
from ..layout.layout import Layout, StageKind
from ..layout.mesh import Mesh
from .cost_context import CostContext
from .precision import MASTER_BYTES
from .roofline import DeviceRates, memory_seconds, product_seconds
from .traffic_term import TrafficTerm

MUON = "muon"
HALF_BYTES = 2  # of bfloat16
NORM_TENSORS = 3  # an update is cast, read for its norm, and divided by it


class EqualMatrices(NamedTuple):
    """Matrices of one weight, which layers have: the weight's shards on every tensor-parallel rank, how many a rank has of a layer, and
    of all dense layers together."""

    shards: tuple[WeightShard, ...]
    in_layer: int
    in_dense_layers: int

    @property
    def whole(self) -> tuple[int, int]:
        """The rows and columns of a whole one."""
        return self.shards[0].matrix

    @property
    def local(self) -> int:
        """The elements of a rank's block, with padding."""
        return prod(self.shards[0].size[-2:])

    def block(self, tensor: int) -> int:
        """The elements of the block of a tensor-parallel rank."""
        return prod(self.shards[tensor].length[-2:])

    def given(self, tensor: int) -> int:
        """The elements that a tensor-parallel rank gives: of several with the same block, the first does."""
        return 0 if self.shards[tensor].copy else self.block(tensor)


class DealtMatrices(NamedTuple):
    """Equal matrices of a stage: the number of the first in the order in which they are dealt, and how many there are."""

    equal: EqualMatrices
    first: int
    many: int

    def on(self, at: int, every: int) -> int:
        """How many are dealt to rank `at` of `every`."""
        return dealt(self.first, self.many, at, every)


def element_bytes(run: Run) -> int:
    """The bytes of an element of what is orthogonalised: float32 where a run computes in it, else bfloat16."""
    return MASTER_BYTES if run.train.precision == "fp32" else HALF_BYTES


def stage_matrices(context: CostContext, mesh: Mesh, kind: StageKind, *, expert: bool) -> list[DealtMatrices]:
    """The matrices of a rank of a kind of stage in the order in which they are dealt, those of experts that data-parallel ranks share out
    or all others."""
    if context.run.optim.name != MUON:
        return []
    key = (MUON, mesh.tp, mesh.ep, expert)
    if key not in context.memo:
        context.memo[key] = list(_equal_matrices(context, mesh, expert))
    found, first = [], 0
    for equal in context.memo[key]:
        count = kind.layers * equal.in_layer + kind.first * equal.in_dense_layers
        if not count:
            continue
        found.append(DealtMatrices(equal, first, count))
        first += count
    return found if first else []


def _equal_matrices(context: CostContext, mesh: Mesh, expert: bool) -> Iterator[EqualMatrices]:
    dense = context.dense_layers
    layers = [*([0] if dense else []), dense]  # a dense one, if there are, and another one
    rows = [
        _shards(context, mesh, each)
        for layer in layers
        for each in model_parameters(context.table, range(layer, layer + 1), first=False, last=False)
        if each.hidden_matrix and not each.frozen
    ]
    rows = [shards for shards in rows if shards[0].expert == expert]
    by_name = {name_in_layer(shards[0].name): shards for shards in rows}
    counts = Counter({shards[0].name: matrices_of(shards[0].size) for shards in rows})
    order = matrix_order([shards[0] for shards in rows])
    for name in dict.fromkeys(name_in_layer(each.shard.name) for each in order):
        yield EqualMatrices(by_name[name], counts[f"layers.{dense}.{name}"], dense * counts[f"layers.0.{name}"] if dense else 0)


def _shards(context: CostContext, mesh: Mesh, parameter: Parameter) -> tuple[WeightShard, ...]:
    multiple = context.run.model.vocab_multiple
    return tuple(
        weight_shard(parameter, context.table.sizes, mesh.tp, rank, vocab_multiple=multiple, ep=mesh.ep) for rank in range(mesh.tp)
    )


class MatrixRanks(NamedTuple):
    """The data-parallel ranks to which matrices are dealt, and whether each of them steps a part of every matrix (else all of it)."""

    ranks: int
    sharded: bool


def matrix_ranks(zero: int, shard: int, copies: int) -> MatrixRanks:
    """The ranks to which matrices are dealt: those over which ZeRO shards, else those that all step the same."""
    return MatrixRanks(shard, True) if zero and shard > 1 else MatrixRanks(copies, False)


def _matrix_ranks(layout: Layout, *, expert: bool) -> MatrixRanks:
    whole = max(1, layout.worker_ranks // layout.mesh.ep) if expert else layout.worker_ranks
    shard = layout.expert_shard_ranks if expert else layout.shard_ranks
    return matrix_ranks(layout.parallel.zero, shard, whole // shard if layout.parallel.zero else whole)


def data_place(mesh: Mesh, data: int, ranks: int, *, expert: bool) -> int:
    """The number of a data-parallel rank among the ranks to which its matrices are dealt."""
    if expert:
        outer, inner = divmod(data, mesh.cp)
        data = outer // mesh.ep * mesh.cp + inner
    return mesh.shard_rank(data, ranks, "expert_copies" if expert else "data")


def data_messages(
    context: CostContext, layout: Layout, kind: StageKind, wire: Wire, sync: dp.GradientSync, *, expert: bool
) -> list[dp.DataMessages]:
    """The messages of the data axis on the rank with most matrices; with ZeRO it has as much of each matrix as any other rank."""
    found = stage_matrices(context, layout.mesh, kind, expert=expert)
    ranks, sharded = _matrix_ranks(layout, expert=expert)
    if not found or ranks == 1:
        return []
    width = element_bytes(context.run)
    owned = sum(each.on(0, ranks) * each.equal.local for each in found)
    if sharded:
        held = -(-sum(each.many * each.equal.local for each in found) // ranks)
        return [dp.one_message("all_to_all", elements * width, wire, sync) for elements in (held, owned)]
    return [dp.one_message("all_gather", ranks * owned * width, wire, sync)]


def tensor_messages(context: CostContext, layout: Layout, kind: StageKind, data: int | None, tensor: int) -> list[TrafficRow]:
    """The messages of the tensor axis on a rank of a kind of stage: blocks to owners, and updates back. `data` None: on the data-parallel
    rank with most matrices."""
    mesh, wire, rows = layout.mesh, layout.wires.axes["tp"], []
    for expert in (False, True) if mesh.tp > 1 else ():
        ranks, _ = _matrix_ranks(layout, expert=expert)
        place = 0 if data is None else data_place(mesh, data, ranks, expert=expert)
        found = [each for each in stage_matrices(context, mesh, kind, expert=expert) if each.on(place, ranks)]
        if not found:
            continue
        given = sum(each.on(place, ranks) * each.equal.given(tensor) for each in found)
        returned = sum(each.on(place + ranks * tensor, ranks * mesh.tp) * sum(map(each.equal.block, range(mesh.tp))) for each in found)
        for elements in (given, returned):
            payload = elements * element_bytes(context.run)
            sent, seconds = collective_cost("all_to_all", payload, wire)
            rows.append(TrafficRow("tp", "all_to_all", payload, 1, sent, wire.link, seconds, seconds))
    return rows


def sent_parts(run: Run, shards: Sequence[WeightShard], place: int, ranks: int, held: int, *, expert: bool) -> Iterator[TrafficTerm]:
    """The bytes that rank number `place` of those over which ZeRO shards the matrices of `shards` sends them: its shard has `held` elements
    of these matrices."""
    order, width = matrix_order([each for each in shards if each.expert == expert]), element_bytes(run)
    owned = sum(prod(each.shard.size[-2:]) for each in order[place::ranks])
    kind = "experts' matrices" if expert else "matrices"
    yield TrafficTerm(verb="all_to_all", bytes=held * width, says=f"parts of {kind}, to the ranks that orthogonalise them")
    yield TrafficTerm(verb="all_to_all", bytes=owned * width, says=f"updates of {kind}, back from there")


def newton_schulz_seconds(context: CostContext, layout: Layout, kind: StageKind, rates: DeviceRates) -> float:
    """Seconds a step in which the rank with most matrices orthogonalises them."""
    steps, width, seconds = context.run.optim.muon.ns_steps, element_bytes(context.run), 0.0
    for each, many in _owned(context, layout, kind):
        m, n = sorted(each.whole)
        products = sum(product_seconds(*shape, 1, width, rates.linear, rates) for shape in ((m, m, n), (m, m, m), (m, n, m)))
        seconds += many * (steps * products + memory_seconds(NORM_TENSORS * width * m * n, NORM_TENSORS, rates))
    return seconds


def _owned(context: CostContext, layout: Layout, kind: StageKind) -> Iterator[tuple[EqualMatrices, int]]:
    """The matrices of the first rank, which has most, and how many of each."""
    for expert in (False, True):
        every = _matrix_ranks(layout, expert=expert).ranks * layout.mesh.tp
        for each in stage_matrices(context, layout.mesh, kind, expert=expert):
            yield each.equal, each.on(0, every)


def step_bytes(context: CostContext, layout: Layout, kind: StageKind, gradient: int) -> int:
    """The bytes that the step of the matrices holds for a moment, those of experts that are shared out after those of all others: updates,
    unless they take the place of gradients of the same type, and the most of blocks and whole matrices with the products of the largest,
    of what travels on the tensor axis, of parts on the data axis, and of gathered updates."""
    width = element_bytes(context.run)
    in_place = gradient == width and context.run.train.precision != "fp16"
    updates, most = 0, 0
    for expert in (False, True):
        found = stage_matrices(context, layout.mesh, kind, expert=expert)
        if not found:
            continue
        ranks, sharded = _matrix_ranks(layout, expert=expert)
        whole = sum(each.many * each.equal.local for each in found)
        stepped = -(-whole // ranks) if sharded else whole
        updates += 0 if in_place else stepped
        every = ranks * layout.mesh.tp
        local = sum(each.on(0, ranks) * each.equal.local for each in found)
        owned = sum(each.on(0, every) * prod(each.equal.whole) for each in found)
        largest = max(2 * prod(each.equal.whole) + 2 * min(each.equal.whole) ** 2 for each in found if each.on(0, every))
        split, blocks = layout.mesh.tp > 1, local if sharded else 0
        most = max(
            most,
            largest + (blocks + owned if split else local if ranks > 1 else 0),
            blocks + 2 * owned + local if split else 0,
            stepped + 2 * local if sharded else 0,
            local + ranks * local if ranks > 1 and not sharded else 0,
        )
    return width * (updates + most)
