"""Messages that DeepSpeed 0.19 sends on the data axis, as read in its source and counted to the byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from ...spec.run import Run
from ..axes.weight_slices import WeightShard
from ..costs.precision import MASTER_BYTES, widths
from ..costs.traffic_term import TrafficTerm
from ..layout.mesh import Mesh
from .defaults import ALIGNED, PERSISTENT, REUSED
from .memory import effective_stage


def traffic_terms(run: Run, mesh: Mesh, held: Sequence[WeightShard]) -> Iterator[TrafficTerm]:
    """Yield what DeepSpeed sends in a step for the weight shards that a rank holds (source and ledger of 0.19.8)."""
    train, ranks = run.train, mesh.size("data")
    if ranks == 1:
        return
    width = widths(run)
    stage = effective_stage(run.parallel.zero, half=width.weight < MASTER_BYTES, ep=mesh.ep)
    micros = train.batch // (mesh.dp * train.microbatch)
    shards = [each for each in held if run.model.is_trained(each.name)]
    if stage == 3:
        frozen = [prod(each.size) for each in held if not run.model.is_trained(each.name)]
        yield from _stage3_terms([prod(each.size) for each in shards], frozen, ranks, micros, width.weight)
        return
    rows = [(sum(prod(each.size) for each in group), copies) for group, copies in _flat_groups(shards, ranks, mesh.ep) if copies > 1]
    flat = [elements for elements, _ in rows]
    padded = [_round_up(elements, ALIGNED * copies) for elements, copies in rows]
    # At ZeRO 1 the optimizer of bf16 with float32 gradients reduces its flat tensors with their padding.
    reduced = sum(padded if stage == 1 and width.gradient > width.weight else flat)
    rounds = micros if stage == 2 else 1
    often = f", at each of {micros} micro-batches" if rounds > 1 else ""
    cut = "one message" if stage == 0 else "cut between parameters into buckets"
    yield TrafficTerm(verb="all_reduce", bytes=rounds * reduced * width.weight, says=f"gradients as wide as weights{often}, {cut}")
    if stage:
        added = (sum(padded) - sum(flat)) * width.weight
        says = (
            f"weights in one message for those that decay and one for the others, "
            f"padded by {added} bytes to a multiple of {ALIGNED * ranks} elements"
        )
        yield TrafficTerm(verb="all_gather", bytes=sum(padded) * width.weight, says=says)


def _flat_groups(shards: Sequence[WeightShard], ranks: int, ep: int) -> Iterator[tuple[list[WeightShard], int]]:
    """Yield (weights of one flat tensor, data-parallel ranks that hold them): those that decay and those that do not, and of each
    experts split over ranks apart."""
    for decays, expert in ((True, False), (False, False), (True, True), (False, True)):
        yield [each for each in shards if (each.decays, each.expert) == (decays, expert)], ranks // ep if expert else ranks


def _stage3_terms(trained: Sequence[int], frozen: Sequence[int], ranks: int, micros: int, width: int) -> Iterator[TrafficTerm]:
    """Each parameter is padded to a multiple of the ranks. Backward finds what forward gathered if it is reused within `REUSED` elements;
    beyond that some are gathered twice: how many is known only to be at most all."""
    sizes = [*trained, *frozen]
    every, persistent = (sum(_round_up(size, ranks) * width for size in sizes if size <= most) for most in (max(sizes), PERSISTENT))
    if persistent:
        says = f"parameters of at most {PERSISTENT} elements gathered once, after the optimizer's step"
        yield TrafficTerm(verb="all_gather", bytes=persistent, says=says)
    if every > persistent:
        once = micros * (every - persistent)
        again = 2 * sum(sizes) > REUSED
        how = (
            f"once for forward, and again for backward those not reused within {REUSED:,} elements"
            if again
            else "once for forward and backward"
        )
        says = f"the others at each of {micros} micro-batches, {how}"
        yield TrafficTerm(verb="all_gather", bytes=once, says=says, most=2 * once if again else None)
    says = f"gradients at each of {micros} micro-batches, each padded to a multiple of {ranks} elements, cut into buckets"
    yield TrafficTerm(verb="reduce_scatter", bytes=micros * sum(_round_up(size, ranks) * width for size in trained), says=says)


def _round_up(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple
