"""Gradient buckets of engine `native`: which weights travel in one message of the data axis, and where each begins in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple, TypeVar

from ...spec.derived.width_scaling import is_rate_divided
from ...spec.run import Parallel, Run
from ..axes.powersgd_factors import compressed_stack
from ..axes.weight_slices import WeightShard
from ..costs.muon import MUON
from ..layout.gradient_routes import inner_ranks, server_count
from ..layout.mesh import Mesh
from ..layout.schedule_of_run import schedule_of
from ..layout.workers import worker_ranks


class BucketKind(NamedTuple):
    """What the weights of a bucket have in common: whether other axes sum their gradients before the data axis does (`late`), whether
    data-parallel ranks share out the experts, whether weight decay applies, whether gradients travel as two factors (parallel.compress),
    whether they are matrices that Muon steps, whether their learning rate falls with the width (optim.mup), whether the last stage has a
    copy: alone in their bucket at both ends, the data axis adds up their elements in one order, and the copies stay equal."""

    late: bool
    expert: bool
    decays: bool
    compressed: bool = False
    matrices: bool = False
    by_width: bool = False
    on_both_ends: bool = False


class Bucket(NamedTuple):
    """Weights of one kind in one flat tensor, padded to a multiple of the ranks that share it."""

    kind: BucketKind
    names: tuple[str, ...]
    starts: tuple[int, ...]  # the first element of each weight
    elements: int  # with padding
    end: int  # the elements without it

    def shard(self, ranks: int, rank: int) -> range:
        """The elements that one of `ranks` ranks steps."""
        size = self.elements // ranks
        return range(rank * size, (rank + 1) * size)

    def filled(self, ranks: int, rank: int) -> int:
        """The elements of weights, without padding, that one of `ranks` ranks steps."""
        return max(0, min(self.end, self.shard(ranks, rank).stop) - self.shard(ranks, rank).start)


def sharing_ranks(run: Run, mesh: Mesh, *, expert: bool) -> tuple[int, int]:
    """(the ranks over which ZeRO shards a bucket, the ranks that own the same shard and sum its gradients at each step)."""
    parallel, worker = run.parallel, worker_ranks(run.parallel, mesh, run.cluster.gpus)
    whole = max(1, worker // mesh.ep) if expert else worker
    if not parallel.zero:
        return 1, whole
    shard = whole if parallel.shard == "all" else max(1, parallel.shard // mesh.ep) if expert else parallel.shard
    return shard, whole // shard


def bucket_parts(run: Run, mesh: Mesh, *, expert: bool) -> int:
    """The equal parts that a bucket is cut into: ZeRO's shards, those that parameter servers own, or those that the ranks of a node sum."""
    ranks, _ = sharing_ranks(run, mesh, expert=expert)
    return max(ranks, server_count(run.parallel, mesh), inner_ranks(run.parallel, mesh, run.cluster.gpus))


def compression_rank(parallel: Parallel, mesh: Mesh, *, expert: bool) -> int:
    """The columns of the factors as which matrices of gradients travel; 0: gradients travel whole, or don't travel."""
    copies = mesh.size("expert_copies" if expert else "data")
    return parallel.compress.rank if parallel.compress.name == "powersgd" and not parallel.zero and copies > 1 else 0


def gradient_buckets(run: Run, mesh: Mesh, shards: Sequence[WeightShard]) -> list[Bucket]:
    """Cut the trained weights that a rank holds, in the table's order, into buckets of at most parallel.bucket elements (or one weight).

    Buckets are in the order of backward, in which the first weight of the table is complete last; the late ones follow.
    """
    rows = [(at, _kind(run, mesh, each), each) for at, each in enumerate(shards) if run.model.is_trained(each.name)]
    cut = list[tuple[bool, int, Bucket]]()
    for kind in sorted({kind for _, kind, _ in rows}):
        ranks = bucket_parts(run, mesh, expert=kind.expert)
        for some in consecutive_groups([row for row in reversed(rows) if row[1] == kind], run.parallel.bucket, _elements):
            cut.append((kind.late, -some[-1][0], _bucket(kind, [each for _, _, each in some], ranks)))
    return [bucket for *_, bucket in sorted(cut, key=lambda row: row[:2])]


def _kind(run: Run, mesh: Mesh, shard: WeightShard) -> BucketKind:
    is_shared = shard.shared or (run.parallel.sequence and mesh.tp > 1 and not shard.is_split)
    compressed = compressed_stack(shard.size, compression_rank(run.parallel, mesh, expert=shard.expert)) is not None
    on_both_ends, by_muon = is_tied_over_stages(run, mesh, shard.name), run.optim.name == MUON and shard.hidden_matrix
    by_width = is_rate_divided(run, shard.name, len(shard.size))
    return BucketKind(is_shared or on_both_ends, shard.expert, shard.decays, compressed, by_muon, by_width, on_both_ends)


def is_tied_over_stages(run: Run, mesh: Mesh, name: str) -> bool:
    """Whether a weight is the embedding's, and the last stage has a copy of it."""
    return run.model.shares_embedding and name == "embedding.weight" and mesh.pp > 1 and not schedule_of(run.parallel).folded


Row = tuple[int, BucketKind, WeightShard]
T = TypeVar("T")


def _elements(row: Row) -> int:
    return prod(row[2].size)


def consecutive_groups(rows: Sequence[T], most: int, elements: Callable[[T], int]) -> Iterator[list[T]]:
    """Cut rows into groups of consecutive ones: of at most `most` elements each, or of one row."""
    group, filled = list[T](), 0
    for row in rows:
        if group and filled + elements(row) > most:
            yield group
            group, filled = [], 0
        group.append(row)
        filled += elements(row)
    if group:
        yield group


def _bucket(kind: BucketKind, shards: Sequence[WeightShard], ranks: int) -> Bucket:
    starts, end = list[int](), 0
    for each in shards:
        starts.append(end)
        end += prod(each.size)
    return Bucket(kind, tuple(each.name for each in shards), tuple(starts), -(-end // ranks) * ranks, end)
