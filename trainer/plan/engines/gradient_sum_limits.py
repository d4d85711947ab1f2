"""Limits of an engine on how ranks sum gradients: seldom, late, in two levels, by servers, compressed."""

from __future__ import annotations

from collections.abc import Iterator

from ...spec.changed_run import Change
from .asked_layout import AskedLayout, Conflict
from .engine_limit import EngineLimit


def sync_limits(asked: AskedLayout) -> Iterator[EngineLimit]:
    """Replicas that step alone shard and count labels for themselves."""
    key, every, data = "parallel.sync.every", asked.parallel.sync.every, asked.run.data
    together: Change = ((key, 1),)
    if every <= 1:
        return
    if not asked.row.steps_alone:
        yield asked.limit(key, every, asked.any_engine, together)
        return
    conflicts = (
        asked.late_weights,
        asked.shards_of_some,
        Conflict(data.has_prompts, "data.name", data.name),
        Conflict(data.documents, "data.documents", "true", (("data.documents", False),)),
        asked.made_by_transformers,
        asked.moments_of_8_bits,  # which are averaged when they are saved
    )
    yield from asked.first_conflict(key, every, conflicts, together)


def late_sum_limits(asked: AskedLayout) -> Iterator[EngineLimit]:
    """A sum that is used late is one message of a step's gradients, after which none may have to follow: no backward waits for memory that
    it frees, and no loss scale changes meanwhile."""
    key, staleness, zero = "parallel.staleness", asked.parallel.staleness, asked.parallel.zero
    fresh: Change = ((key, 0),)
    if not staleness:
        return
    if not asked.row.stale_class:
        yield asked.limit(key, staleness, asked.any_engine, fresh)
        return
    conflicts = (
        asked.late_weights,
        Conflict(zero > 1, "parallel.zero", zero, (("parallel.zero", 1),)),
        asked.shards_of_some,
        asked.workers_alone,
        asked.late_precision,
    )
    yield from asked.first_conflict(key, staleness, conflicts, fresh)


def route_limits(asked: AskedLayout) -> Iterator[EngineLimit]:
    """Halving and trees are planned only. Sums in two levels and parameter servers stand for the one sum of whole gradients at each step.
    Those in two levels are several messages, so they are not used late."""
    key, route, ep = "parallel.reduce", asked.parallel.reduce, asked.parallel.ep
    ring: Change = ((key, "ring"),)
    if route in ("auto", "ring"):
        return
    if route in ("halving", "tree"):
        yield asked.limit(key, route, ((key, "auto"),), ring)
    elif not asked.row.routes_sums:
        other_engine = (*asked.any_engine, *asked.zero_0) if asked.any_engine else ()
        yield asked.limit(key, route, other_engine, ring)
    else:
        conflicts = (
            asked.any_shard,
            asked.late_weights,
            Conflict(ep > 1, "parallel.ep", ep, (("parallel.ep", 1),)),
            asked.workers_alone,
            *((asked.late_sums,) if route == "hierarchical" else ()),
        )
        yield from asked.first_conflict(key, route, conflicts, ring)


def compression_limits(asked: AskedLayout) -> Iterator[EngineLimit]:
    """Factors stand for the whole sum of a matrix's gradients, which a rank steps with once: no rank keeps a shard of it, no update comes
    late, and no loss scale changes the error's units between two steps."""
    compressed = asked.compressed
    if not compressed.is_there:
        return
    if not asked.row.compresses:
        native = (("engine", "native"), *asked.zero_0)
        yield asked.limit(compressed.key, compressed.value, asked.any_engine, native, compressed.change)
        return
    conflicts = (
        asked.any_shard,
        asked.workers_alone,
        asked.late_weights,
        asked.late_precision,
        asked.late_sums,
        asked.routed_sums,
    )
    yield from asked.first_conflict(compressed.key, compressed.value, conflicts, compressed.change)
