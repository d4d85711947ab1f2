"""The cost of a layout: memory of every stage and seconds of a step. Plans and estimates share it."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from ..spec.run import Parallel
from .axes import pp
from .costs.block_costs import BlockCosts
from .costs.cost_context import CostContext
from .costs.local_tensors import BlockSplit, block_split
from .engines import cost_model
from .layout.held_passes import held_passes
from .layout.layout import Layout
from .part_seconds import is_simulated, simulated_wait
from .replica_wait import replica_wait_seconds
from .stage_cost import StageCost, defers_products, stage_costs


class StepSeconds(NamedTuple):
    """Seconds of a step by cause; they add up to `step`. `host` is what the host does once a step while devices wait, `fill` the bubble's
    share of the pipeline's time."""

    step: float
    compute: float
    exposed: float
    bubble: float
    optimizer: float
    host: float
    fill: float


class LayoutCost(NamedTuple):
    """Costs of a layout."""

    peak: int  # bytes of the fullest rank; on a CPU with what it would keep on a host, which stays in the same memory
    fullest: int  # its stage, the first of equals
    host: int  # bytes that the ranks of a node hold on its host, of the fullest node
    kinds: list[StageCost]  # of each kind of stage
    blocks: BlockCosts
    seconds: StepSeconds | None  # None: a rate is unknown


def layout_cost(context: CostContext, layout: Layout) -> LayoutCost:
    """The memory and the time of a layout."""
    blocks = layout_blocks(context, layout)
    kinds = stage_costs(context, layout, blocks, layout.partition.kinds)
    peak, fullest, host = peak_bytes(context, layout, kinds)
    seconds = step_seconds(context, layout, blocks, kinds) if has_times(context, layout) else None
    return LayoutCost(peak, fullest, host, kinds, blocks, seconds)


def layout_blocks(context: CostContext, layout: Layout) -> BlockCosts:
    """The costs of a layout's blocks, cached by their split."""
    return context.block_costs(layout_split(layout), layout.wires)


def layout_split(layout: Layout) -> BlockSplit:
    """How a layout splits its blocks."""
    model = cost_model(layout.engine)
    split = block_split(layout.parallel, layout.microbatch, layout.form, fused=layout.fused, hides_messages=model.hides_messages)
    return split._replace(hooks=model.hooks(layout.parallel))


def peak_bytes(context: CostContext, layout: Layout, kinds: list[StageCost]) -> tuple[int, int, int]:
    """(bytes of the fullest rank, its stage, bytes on the host of the fullest node).

    The first of equal stages holds most: micro-batches in flight and copies of weights grow towards the front, except in a user's lists.
    """
    alone = layout.schedule.simulated or defers_products(layout)  # later stages may hold more products that wait
    stages = list(enumerate(layout.partition.kind_of_stage)) if alone else layout.partition.runs
    peak, fullest = max([(stage_bytes(layout, kinds[at], index), -index) for index, at in stages])
    host = host_bytes(context, layout, kinds)
    if context.run.cluster.device.kind == "cpu":
        peak += host // context.run.cluster.gpus
    return peak, -fullest, host


def stage_bytes(layout: Layout, kind: StageCost, index: int) -> int:
    """Bytes of a rank of stage `index`, which is of this kind."""
    fixed = kind.fixed + extra_weight_copies(layout, index) * kind.states.version if layout.delay else kind.fixed
    step, saved = kind.states.bytes.step, sum(kept_bytes(layout, kind, index))
    if layout.delay:
        return fixed + saved + max(kind.temporary, step)  # weights are stepped while micro-batches are in flight
    return fixed + max(saved + kind.temporary, step)


class KeptBytes(NamedTuple):
    """What a stage keeps of its micro-batches for their backward: activations, logits, and results that it passed on."""

    activations: int
    logits: int
    passing: int


def kept_bytes(layout: Layout, kind: StageCost, index: int) -> KeptBytes:
    """What stage `index`, of this kind, keeps at most."""
    apart = kind.deferred
    if apart is None:
        return _whole_kept_bytes(kind, in_flight(layout, index))
    kept = []
    for held in held_passes(layout.schedule, index, layout.mesh.pp, layout.micros, layout.parallel.chunks):
        whole = _whole_kept_bytes(kind, held.saved)
        in_head = held.saved_in_head * apart.head_saved + held.deferred_in_head * apart.head
        activations = whole.activations - kind.saved_last + ceil(held.deferred * apart.layers) + in_head
        kept.append(KeptBytes(activations, held.saved_in_head * apart.head_logits, whole.passing))
    return max(kept, key=sum)


def _whole_kept_bytes(kind: StageCost, micros: float) -> KeptBytes:
    """What a stage keeps of so many micro-batches between forward and backward."""
    passes, saved = kind.passes, ceil(kind.passes.saved * micros)
    return KeptBytes(saved + kind.saved_last, kind.logits, ceil((passes.saved + passes.held.passing) * micros) - saved)


def uses_host(context: CostContext, layout: Layout) -> bool:
    """Whether ranks keep anything in their hosts' memory."""
    return layout.offloads or context.run.checkpoint.in_background


def host_bytes(context: CostContext, layout: Layout, kinds: list[StageCost]) -> int:
    """Bytes that the ranks of a node hold on its host, of the fullest node."""
    if not uses_host(context, layout):
        return 0
    gpus, world = context.run.cluster.gpus, context.world
    ranks, stages = world // layout.mesh.pp, layout.partition.kind_of_stage  # a stage's ranks follow one another
    of_stage = [kinds[at].states.bytes.host.total for at in stages]
    if len(set(of_stage)) == 1:
        return gpus * of_stage[0]
    nodes = {node for stage in range(len(stages)) for node in (stage * ranks // gpus, stage * ranks // gpus + 1) if node * gpus < world}
    return max([_node_bytes(of_stage, ranks, node * gpus, (node + 1) * gpus) for node in nodes])


def _node_bytes(of_stage: list[int], ranks: int, first: int, end: int) -> int:
    """The sum over ranks [first, end), of stages with so many ranks, of which each holds the bytes of its stage."""
    stages = range(first // ranks, (end - 1) // ranks + 1)
    return sum([of_stage[each] * (min(end, (each + 1) * ranks) - max(first, each * ranks)) for each in stages])


def fits(context: CostContext, peak: int, host: int) -> bool:
    """Whether these bytes of the fullest rank, and of a node's host, are there."""
    memory = context.run.cluster.host.memory if context.run.cluster.device.kind == "cuda" else None
    return peak <= context.capacity and (memory is None or host <= memory)


def in_flight(layout: Layout, index: int) -> float:
    """Micro-batches whose activations stage `index` holds at once; one without a pipeline."""
    stages = layout.mesh.pp
    if stages == 1:
        return 1
    micros = max(layout.micros, stages) if layout.delay else layout.micros  # without a flush, those of the next steps follow
    return layout.schedule.in_flight(index, stages, micros, layout.parallel.chunks)


def extra_weight_copies(layout: Layout, index: int) -> int:
    """Older copies of its weights that stage `index` keeps under a schedule that doesn't flush."""
    return layout.delay.versions_held(index, layout.mesh.pp) - 1 if layout.delay else 0


def has_times(context: CostContext, layout: Layout) -> bool:
    """Whether every rate is known that the step's time depends on."""
    if context.rates is None or (layout.offloads and context.host_rates is None):
        return False
    return layout.wires.are_known


def sends_per_step(layout: Layout, index: int) -> int:
    """Tensors that stage `index` sends in a step: activations to the next stage, gradients to the one before.

    With chunks the stages form a ring: the last sends to the first, except at the model's two ends. A folded pipeline turns around on
    the last stage and ends on the first.
    """
    stages, chunks = layout.mesh.pp, layout.parallel.chunks
    if stages == 1:
        return 0
    if layout.is_folded:
        return layout.micros * 2 * (2 - (index == stages - 1) - (index == 0))
    forward = chunks - (index == stages - 1)
    backward = chunks - (index == 0)
    return layout.micros * (forward + backward)


def send_bytes(parallel: Parallel, blocks: BlockCosts) -> int:
    """Bytes of one tensor between stages; with `scatter`, 1/tp of the hidden states."""
    scatter = parallel.scatter and not parallel.sequence
    return -(-blocks.stream // parallel.tp) if scatter else blocks.stream


def step_seconds(context: CostContext, layout: Layout, blocks: BlockCosts, kinds: list[StageCost]) -> StepSeconds:
    """m micro-batches on the busiest stage, one on each other stage while the pipeline fills and drains, the exposed messages of the
    data axis with the wait for its slowest rank, and the optimizer (arXiv:2104.04473 section 2.2)."""
    hop = hop_seconds(layout, blocks)
    totals, busiest = [kind.passes.seconds + hop for kind in kinds], busiest_kind(kinds)
    bubble = _bubble_seconds(layout, blocks, kinds, totals, busiest, hop)
    computing = kinds[busiest].passes.compute
    compute = layout.micros * computing
    messages = layout.micros * (totals[busiest] - computing)
    slowest = max(kinds, key=lambda kind: kind.exposed + kind.step)
    apart = tied_seconds(context, layout, blocks) + replica_wait_seconds(context, layout, blocks, kinds[0].messages)
    pipeline = compute + messages + bubble
    waited = (pipeline + slowest.exposed + apart) * context.tail
    return StepSeconds(
        step=pipeline + slowest.exposed + slowest.step + apart + waited + context.step_overhead,
        compute=compute + waited,
        exposed=messages + slowest.exposed + apart,
        bubble=bubble,
        optimizer=slowest.step,
        host=context.step_overhead,
        fill=bubble / pipeline,
    )


def busiest_kind(kinds: list[StageCost]) -> int:
    """Which kind of stage takes longest for a micro-batch, the first of equals; all have the same messages between stages."""
    return max(range(len(kinds)), key=lambda at: kinds[at].passes.seconds)


def _bubble_seconds(layout: Layout, blocks: BlockCosts, kinds: list[StageCost], totals: list[float], busiest: int, hop: float) -> float:
    """Seconds that the busiest stage waits for the others; `totals` are seconds of a micro-batch on each kind of stage, `hop` those of its
    messages between stages."""
    stages = layout.mesh.pp
    if stages == 1:
        return 0.0
    if is_simulated(layout):
        return simulated_wait(layout, blocks, hop, totals[busiest])
    schedule, many = layout.schedule, layout.partition.stages_of_kind
    wait = schedule.fill(layout.parallel.chunks) * _seconds_of_others(totals, many, busiest)
    if filled := schedule.filled_by_weights(stages, layout.micros):
        wait -= filled * _seconds_of_others([kind.passes.weight_gradients for kind in kinds], many, busiest)
    return max(0.0, wait)


def _seconds_of_others(seconds: list[float], many: tuple[int, ...], busiest: int) -> float:
    """The sum over all stages but the busiest of the seconds of their kinds, of which there are so `many`."""
    return sum([each * times for each, times in zip(seconds, many, strict=True)]) - seconds[busiest]


def hop_seconds(layout: Layout, blocks: BlockCosts) -> float:
    """Exposed seconds of a micro-batch's messages between stages: in and out of each part of the model that a stage has."""
    parallel = layout.parallel
    if parallel.pp == 1 or parallel.overlap.pipeline:
        return 0.0
    return pp.send_seconds(send_bytes(parallel, blocks), layout.wires.pair) * (2 * layout.chunks)


def tied_seconds(context: CostContext, layout: Layout, blocks: BlockCosts) -> float:
    """Exposed seconds a step of the sum of tied weights over the first and the last stage."""
    if layout.mesh.pp == 1 or layout.is_folded or blocks.tied_gradient == 0:
        return 0.0
    engine = cost_model(layout.engine)
    payload = engine.tied_elements(context, layout, blocks, None) * engine.summed_width(context, layout)
    return pp.tied_seconds(payload, layout.wires.pair)
