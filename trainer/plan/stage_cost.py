"""What a pipeline stage costs one rank: memory by kind, seconds of a micro-batch, messages of the data axis."""

from __future__ import annotations

from typing import NamedTuple

from . import tensor_sums
from .axes import dp
from .axes.traffic_row import Line
from .block_costs import Pieces
from .cost_context import Frame
from .deepspeed.memory import MASTER, Holds, Zero, holds, stage_of
from .layout import Kind, Layout
from .schedules import SCHEDULES


class Stage(NamedTuple):
    """One kind of stage: so many layers, with or without embedding and head. Bytes; seconds of one micro-batch.

    `kept` are activations of one micro-batch in flight, `kept_last` those that only the micro-batch in hand keeps, `passing` what a
    pipeline's engine holds beside them of each in flight.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    kept: int
    kept_last: int
    passing: int
    logits: int
    buffers: int
    overhead: int
    forward: float
    backward: float
    weight: float
    talk_forward: float
    talk_backward: float
    data: list[Line]
    exposed: float  # of the data axis and of what the tensor axis adds up, a step
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
    kept += (1 + layout.folded) * pieces.angles
    if first:
        kept += pieces.embedding.kept - pieces.angles
    if last:
        held = last_held(layout)
        kept_last, logits = held * head.kept, held * head.logits
    if first and last:
        dense -= pieces.tied
    data = _data(frame, layout, layers, dense, experts, forward, backward)
    added = tensor_sums.lines(frame, layout, pieces, kind)
    weights, gradients, optimizer = _states(frame, layout, dense, experts)
    buffers = _buffers(frame, layout, pieces, dense + experts, first=first, last=last)
    passing = 0
    if frame.form == "torch" and layout.way.deepspeed:
        weights, gradients, optimizer, bucket = _counted(frame, layout, kind, dense + experts)
        streams = _streams(layout, kind)
        passing = streams * pieces.stream
        buffers = layer.working + bucket + _gathered(layout, pieces) + min(streams, 2) * pieces.stream
    return Stage(
        parameters=dense + experts,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        kept=kept,
        kept_last=kept_last,
        passing=passing,
        logits=logits,
        buffers=buffers,
        overhead=frame.context,
        forward=forward,
        backward=backward,
        weight=weight,
        talk_forward=talk_forward,
        talk_backward=talk_backward,
        data=data,
        exposed=sum([line.exposed for line in (*added, *data)]),
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


def _counted(frame: Frame, layout: Layout, kind: Kind, parameters: int) -> Holds:
    """The same, and what passes through, as DeepSpeed holds them."""
    width, parallel, mesh = frame.widths, layout.parallel, layout.mesh
    way = Zero(
        stage=stage_of(parallel.zero, half=width.weight < MASTER, ep=mesh.ep),
        ranks=mesh.dp * mesh.cp,
        micros=layout.micros,
        weight=width.weight,
        gradient=width.gradient,
        states=frame.states,
        bucket=min(parallel.bucket, parameters if mesh.pp > 1 else frame.parameters),
        pipeline=mesh.pp > 1,
    )
    held = holds(way, parameters, frame.flat(kind, mesh))
    offload = parallel.offload
    return held._replace(weights=held.weights * (not offload.parameters), optimizer=held.optimizer * (not offload.optimizer))


def _streams(layout: Layout, kind: Kind) -> int:
    """Residual streams that DeepSpeed's pipeline holds of a micro-batch in flight beside what its layers save: of each part what came
    in, which they are given a copy of, and what goes out, until its gradient is there. As many are a receive's and a gradient's
    buffers, at the most one of each."""
    if layout.mesh.pp == 1:
        return 0
    return 2 * (1 + layout.folded) - kind.first - kind.last


def _gathered(layout: Layout, pieces: Pieces) -> int:
    """A column layer's input, gathered along the sequence."""
    return pieces.stream * layout.parallel.tp if layout.parallel.sequence and layout.parallel.tp > 1 else 0


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
    total += _gathered(layout, pieces)
    if layout.mesh.pp > 1:
        total += 2 * pieces.stream  # one tensor coming, one gradient going
    return total


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
