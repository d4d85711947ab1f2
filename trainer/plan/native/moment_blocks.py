"""Scales of moments that engine `native` keeps in 8 bits: how many blocks a rank's parts of weights have
(trainer/engines/quantized_moment.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from ..axes.weight_slices import WeightShard, weight_shard
from ..costs.cost_context import CostContext
from ..costs.precision import MOMENT_BLOCK, SCALE_BYTES
from ..layout.layout import Layout, StageKind
from .buckets import Bucket, bucket_parts, gradient_buckets
from .dim0_shards import stage_rows


def scale_bytes(context: CostContext, layout: Layout, kind: StageKind) -> int:
    """Return the bytes of the scales of a rank of a kind of stage, the first of those that share its states; 0 without moments in 8
    bits."""
    optim = context.run.optim
    if optim.moments != "int8":
        return 0
    parallel, mesh = layout.parallel, layout.mesh
    key = ("blocks", kind, mesh, parallel.zero, parallel.shard, parallel.reduce, parallel.bucket, parallel.sequence)
    if key not in context.memo:
        context.memo[key] = sum(_part_scales(context, layout, kind))
    found: int = context.memo[key]
    return found * SCALE_BYTES


def _part_scales(context: CostContext, layout: Layout, kind: StageKind) -> Iterator[int]:
    """Yield the scales of each weight's part."""
    if layout.parallel.zero == 3 and layout.shard_ranks > 1:
        for row, many in stage_rows(context, kind, layout.mesh):
            own = row.on_rank(layout.expert_shard_ranks if row.expert else layout.shard_ranks, None)
            yield many * _scales(context, own, is_matrix=row.hidden_matrix)
        return
    run, mesh, sizes = replace(context.run, parallel=layout.parallel), layout.mesh, context.table.sizes
    shards = [
        weight_shard(each, sizes, mesh.tp, 0, vocab_multiple=run.model.vocab_multiple, ep=mesh.ep)
        for each in context.stage_parameters(kind)
        if not each.frozen
    ]
    if all(_owned_parts(layout, expert=each) == 1 for each in (False, True)):
        yield from (_scales(context, prod(each.size), is_matrix=each.hidden_matrix) for each in shards)
        return
    named = {each.name: each for each in shards}
    for bucket in gradient_buckets(run, mesh, shards):
        parts = bucket_parts(run, mesh, expert=bucket.kind.expert) if _owned_parts(layout, expert=bucket.kind.expert) > 1 else 1
        for shard, elements in _first_parts(bucket, named, parts):
            yield _scales(context, elements, is_matrix=shard.hidden_matrix)


def _owned_parts(layout: Layout, *, expert: bool) -> int:
    """Return how many ranks each step a part of a bucket: those that ZeRO shards over, or parameter servers."""
    ranks = layout.expert_shard_ranks if expert else layout.shard_ranks
    return max(ranks if layout.gradient_sync.zero else 1, layout.gradient_sync.servers)


def _first_parts(bucket: Bucket, named: dict[str, WeightShard], ranks: int) -> Iterator[tuple[WeightShard, int]]:
    """Yield the weights of which the first of so many ranks steps elements of a bucket, and how many."""
    stop = bucket.shard(ranks, 0).stop
    for name, start in zip(bucket.names, bucket.starts, strict=True):
        elements = min(prod(named[name].size), stop - start)
        if elements > 0:
            yield named[name], elements


def _scales(context: CostContext, elements: int, *, is_matrix: bool) -> int:
    """Return the scales of a part of a weight: of each moment one for each block."""
    optim = context.run.optim
    moments = 1 if optim.name == "sgd" or (optim.name == "muon" and is_matrix) else 2
    return moments * -(-elements // MOMENT_BLOCK)
