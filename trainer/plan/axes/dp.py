"""Data parallelism: gradients are summed over the ranks that hold the same weights, and ZeRO gathers weights (arXiv:1910.02054).

The papers' ZeRO-1 and 2 scatter gradients and gather weights: 2 Psi a step. ZeRO-3 gathers weights for forward and for backward
and scatters gradients: 3 Psi a micro-batch. A `GradientSync` says where an engine differs (trainer/plan/costs/cost_model.py).
"""

from __future__ import annotations

from typing import NamedTuple

from .axis import Axis
from .collectives import Wire, collective_cost
from .traffic_row import TrafficRow

AXIS = Axis(name="dp", splits=("batch",), data=True, overlap="data", source="arXiv:1910.02054")

# Share of a hidden message's time that the computation beside it loses: its kernels take multiprocessors and memory.
CONTENTION = 0.5


class ZeroShards(NamedTuple):
    """Parameters on one rank, trained and frozen, and the groups of their data parallelism."""

    elements: int
    frozen: int
    whole: Wire  # the ranks that hold the same parameters
    shard: Wire  # the ranks of it over which ZeRO shards them
    copies: Wire | None  # the ranks that own the same shard; None: each shard has one owner


class GradientSync(NamedTuple):
    """How gradients and weights travel on the data axis: ZeRO stage, micro-batches a step, bytes an element, elements of a bucket."""

    zero: int
    micros: int
    weight: int
    gradient: int
    bucket: int
    algorithm: str
    scatters: bool  # stages 1 and 2 reduce-scatter gradients; else they all-reduce them
    reused: int  # elements, the last of forward, that backward finds still gathered at stage 3
    gather_hides: bool  # the gather of stepped weights may hide under forward
    overlap: bool
    copies_hide: bool  # owners of the same shard sum it under backward
    often: bool  # gradients travel at every micro-batch, so that no rank holds more than its shard
    updates: int  # updates of the weights in a step: several where a pipeline without a flush updates them after each micro-batch


def traffic_rows(shards: ZeroShards, sync: GradientSync, layers: int, forward: float, backward: float) -> list[TrafficRow]:
    """The traffic of one step.

    `forward` and `backward` are a micro-batch's seconds on the stage, under which messages may hide; ZeRO-3 gathers
    in as many parts as there are layers.
    """
    if shards.elements + shards.frozen == 0 or shards.whole.size == 1:
        return []
    gathered = shards.elements + shards.frozen  # at stage 3
    gradients, weights = shards.elements * sync.gradient, shards.elements * sync.weight
    buckets = -(-shards.elements // sync.bucket)
    if sync.zero == 0 or shards.shard.size == 1:
        return [_traffic_row("all_reduce", gradients, buckets, sync.updates, shards.whole, sync, backward)]
    if sync.zero == 3:
        again = max(0, gathered - sync.reused) * sync.weight
        rows = [
            _traffic_row("all_gather", gathered * sync.weight, layers, sync.micros, shards.shard, sync, forward),
            *([_traffic_row("all_gather", again, layers, sync.micros, shards.shard, sync, backward)] if again else []),
            _traffic_row("reduce_scatter", gradients, layers, sync.micros, shards.shard, sync, backward),
        ]
    else:
        rounds = sync.micros if sync.often else sync.updates
        verb = "reduce_scatter" if sync.scatters else "all_reduce"
        rows = [
            _traffic_row(verb, gradients, buckets, rounds, shards.shard, sync, backward),
            _traffic_row("all_gather", weights, buckets, sync.updates, shards.shard, sync, forward if sync.gather_hides else 0.0),
        ]
    if shards.copies is not None:
        parts = max(1, layers) if sync.copies_hide and sync.zero == 3 else 1
        under = backward if sync.copies_hide else 0.0
        rows.append(_traffic_row("all_reduce", -(-gradients // shards.shard.size), parts, sync.updates, shards.copies, sync, under))
    return rows


def _traffic_row(verb: str, total: int, parts: int, rounds: int, wire: Wire, sync: GradientSync, under: float) -> TrafficRow:
    """`total` bytes in `parts` messages, `rounds` times a step, each round under `under` seconds of computation.

    All parts but one may hide, as far as there is computation to hide under.
    """
    payload = -(-total // parts)
    sent, seconds = collective_cost(verb, payload, wire, sync.algorithm)
    round_seconds = seconds * parts
    exposed = round_seconds
    if sync.overlap and under:
        exposed = max(seconds, round_seconds - under * (1 - CONTENTION), round_seconds * CONTENTION)
    count = parts * rounds
    return TrafficRow("dp", verb, payload, count, sent * count, wire.link, round_seconds * rounds, exposed * rounds)
