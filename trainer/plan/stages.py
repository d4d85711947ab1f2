"""What a pipeline stage costs one rank: memory by kind, seconds of a micro-batch, messages of the data axis."""

from __future__ import annotations

from typing import NamedTuple

from .axes import dp, tp
from .axes.line import Line
from .frame import Frame
from .layout import Kind, Layout
from .pieces import Pieces
from .schedules import SCHEDULES
from .zero import MASTER, Holds, Zero, holds, stage_of


class Stage(NamedTuple):
    """One kind of stage: so many layers, with or without embedding and head. Bytes; seconds of one micro-batch.

    `kept` are activations of one micro-batch in flight, `kept_last` those that only the micro-batch in hand keeps.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    kept: int
    kept_last: int
    logits: int
    buffers: int
    overhead: int
    forward: float
    backward: float
    weight: float
    talk_forward: float
    talk_backward: float
    data: list[Line]
    exposed: float  # of the data axis, a step
    step: float  # the optimizer's seconds

    @property
    def fixed(self) -> int:
        """Bytes that don't depend on how many micro-batches are in flight."""
        return self.weights + self.gradients + self.optimizer + self.logits + self.buffers + self.overhead + self.kept_last


def stage(frame: Frame, layout: Layout, pieces: Pieces, kind: Kind) -> Stage:
    """The cost of one kind of stage."""
    layers, first, last = kind
    layer, head = pieces.layer, pieces.head
    dense, experts = layers * layer.dense, layers * layer.experts
    kept, kept_last, logits = layers * layer.kept, 0, 0
    forward, backward, weight = layers * (layer.forward or 0.0), layers * (layer.backward or 0.0), layers * layer.weight
    talk_forward, talk_backward = layers * layer.talk_forward, layers * layer.talk_backward
    for here, end in ((first, pieces.embedding), (last, head)):
        if here:
            dense += end.dense
            forward += end.forward or 0.0
            backward += end.backward or 0.0
            weight += end.weight
            talk_forward += end.talk_forward
            talk_backward += end.talk_backward
    if first:
        kept += pieces.embedding.kept
    if last:
        held = last_held(layout)
        kept_last, logits = held * head.kept, held * head.logits
    if first and last:
        dense -= pieces.tied
    replicated = layers * layer.replicated + first * pieces.embedding.replicated + last * head.replicated
    data = _once(frame, layout, replicated) + _data(frame, layout, layers, dense, experts, forward, backward)
    weights, gradients, optimizer = _states(frame, layout, dense, experts)
    buffers = _buffers(frame, layout, pieces, dense + experts, first=first, last=last)
    if frame.form == "torch" and layout.way.deepspeed and layout.mesh.size("data") == frame.world:
        weights, gradients, optimizer, passing = _counted(frame, layout)
        buffers = layer.working + passing
    return Stage(
        parameters=dense + experts,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        kept=kept,
        kept_last=kept_last,
        logits=logits,
        buffers=buffers,
        overhead=frame.context,
        forward=forward,
        backward=backward,
        weight=weight,
        talk_forward=talk_forward,
        talk_backward=talk_backward,
        data=data,
        exposed=sum([line.exposed for line in data]),
        step=_step_seconds(frame, layout, dense, experts),
    )


def last_held(layout: Layout) -> int:
    """Micro-batches whose logits the last stage holds at once."""
    return layout.micros if layout.mesh.pp > 1 and SCHEDULES[layout.parallel.schedule].forward_first else 1


def _shared(elements: int, ranks: int) -> int:
    return -(-elements // ranks)


def _states(frame: Frame, layout: Layout, dense: int, experts: int) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer: ZeRO's three stages (arXiv:1910.02054 section 5)."""
    zero, offload = layout.parallel.zero, layout.parallel.offload
    width = frame.widths
    sharded = _shared(dense, layout.shard) + _shared(experts, layout.expert_shard)
    whole = dense + experts
    weights = width.weight * (sharded if zero >= 3 else whole)
    gradients = width.gradient * (sharded if layout.way.often else whole)
    optimizer = (width.master + frame.states) * (sharded if zero >= 1 else whole)
    return weights * (not offload.parameters), gradients, optimizer * (not offload.optimizer)


def _counted(frame: Frame, layout: Layout) -> Holds:
    """The same, and what passes through, as DeepSpeed holds them."""
    width, parallel = frame.widths, layout.parallel
    way = Zero(
        stage=stage_of(parallel.zero, half=width.weight < MASTER),
        ranks=layout.mesh.dp,
        micros=layout.micros,
        weight=width.weight,
        gradient=width.gradient,
        states=frame.states,
        bucket=min(parallel.bucket, frame.parameters),
    )
    held = holds(way, frame.parameters, frame.flat(layout.mesh.dp))
    offload = parallel.offload
    return held._replace(weights=held.weights * (not offload.parameters), optimizer=held.optimizer * (not offload.optimizer))


def _buffers(frame: Frame, layout: Layout, pieces: Pieces, parameters: int, *, first: bool, last: bool) -> int:
    """What passes through: recomputed tensors, ZeRO's buckets or gathered layers, sequence-parallel gathers, messages between stages.

    ZeRO-3 holds two layers' whole weights (the one computed, the one gathered ahead) and one layer's whole gradients.
    """
    parallel, width = layout.parallel, frame.widths
    layer = pieces.layer
    total = layer.working
    if parallel.zero == 3 and layout.shard > 1:
        largest = max(layer.dense + layer.experts, first * pieces.embedding.dense, last * pieces.head.dense)
        total += largest * (2 * width.weight + width.gradient)
    elif layout.shard > 1 and parallel.zero > 0:
        total += min(parallel.bucket, parameters) * width.gradient
    if parallel.sequence and parallel.tp > 1:
        total += pieces.stream * parallel.tp  # a column layer's gathered input
    if layout.mesh.pp > 1:
        total += 2 * pieces.stream  # one tensor coming, one gradient going
    return total


def _once(frame: Frame, layout: Layout, replicated: int) -> list[Line]:
    if layout.parallel.tp == 1 or not layout.parallel.sequence:
        return []
    return [tp.replicated(replicated * frame.widths.gradient, layout.wires.tp)]


def _data(frame: Frame, layout: Layout, layers: int, dense: int, experts: int, forward: float, backward: float) -> list[Line]:
    mesh = layout.mesh
    found: list[Line] = []
    if mesh.ep == 1:
        rows = [(dense + experts, "data", layout.wires.data, layout.shard)]
    else:
        rows = [(dense, "data", layout.wires.data, layout.shard), (experts, "copies", layout.wires.copies, layout.expert_shard)]
    for elements, axis, whole, shard in rows:
        near, far = frame.shards(mesh, axis, whole, shard)
        found += dp.lines(dp.Held(elements, whole, near, far), layout.way, layers, forward, backward)
    return found


def _step_seconds(frame: Frame, layout: Layout, dense: int, experts: int) -> float:
    """Adam reads and writes its states and the master weight, reads the gradient, writes the weight: bound by memory."""
    on = frame.rates
    if on is None:
        return 0.0
    sharded = _shared(dense, layout.shard) + _shared(experts, layout.expert_shard)
    elements = sharded if layout.parallel.zero else dense + experts
    width = frame.widths
    return elements * (2 * ((width.master or width.weight) + frame.states) + width.gradient + width.weight) / on.memory
