"""What one block of a model costs one rank for one micro-batch, read off its op table and the axes that split it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from ..models.families import FAMILIES
from ..models.table import Dims, Op, Table, Tensor, padded
from ..spec.run import Run
from .axes import cp, ep, tp
from .axes.axis import Axis
from .axes.message import Talk
from .collectives import Wire, cost
from .mesh import Wires
from .precision import widths
from .roofline import POINTWISE_BACKWARD, Rates, moving_seconds, product_seconds, rates
from .weight_slices import Heads, local_sizes

Form = Literal["megatron", "torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """All that decides what a block costs one rank, beside the run: the key under which pieces are kept."""

    tp: int
    cp: int
    ep: int
    sequence: bool
    recompute: str
    microbatch: int
    tensor_hidden: bool
    context_hidden: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One block on one rank: parameters; bytes of a micro-batch; seconds of a micro-batch (None: peak unknown).

    `kept` is what stays from forward to backward, `working` what recomputation brings back besides while it runs.
    `replicated` counts the parameters that every tensor-parallel rank holds, `shared` those that some hold together. `weight`
    is the part of `backward` that makes weight gradients. `talk_*` are seconds of messages, exposed.
    """

    dense: int
    experts: int
    replicated: int
    shared: int
    kept: int
    working: int
    logits: int
    forward: float | None
    backward: float | None
    weight: float
    talk_forward: float
    talk_backward: float
    talks: tuple[Talk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The blocks of a model, split in one way."""

    embedding: Piece
    layer: Piece
    head: Piece
    tied: int  # elements of the weight that embedding and head share, on one rank
    stream: int  # bytes of the residual stream that one rank hands to the next stage
    angles: int  # bytes that every part of the model keeps of rotary positions, its layers together


class Local:
    """Sizes of tensors on one rank: whole sizes cut by the axes, padded where they don't divide."""

    def __init__(self, table: Table, split: Split, *, vocab_multiple: int, activation: int) -> None:
        self.activation = activation
        self.degrees = {"tp": split.tp, "cp": split.cp, "ep": split.ep}
        every = (tp.axis(sequence=split.sequence), cp.axis(), ep.axis())
        self.axes = tuple(axis for axis in every if self.degrees[axis.name] > 1)
        self.sizes = {**table.sizes, "batch": split.microbatch, "vocab": padded(table.sizes["vocab"], vocab_multiple * split.tp)}
        local = local_sizes(table.sizes, split.tp, vocab_multiple=vocab_multiple)
        self.slices = {dim: local[dim] for dim in tp.SPLITS if dim in local}

    def shape(self, dims: Dims, *, without: str = "") -> list[int]:
        """Sizes of a tensor on one rank, were it not for the axis `without`; an axis splits one dim of it."""
        found = [self.sizes[dim] for dim in dims]
        for axis in self.axes:
            dim = axis.split(dims)
            if dim is not None and axis.name != without:
                at = dims.index(dim)
                degree = self.degrees[axis.name]
                found[at] = self.slices[dim] if axis.name == "tp" and dim in self.slices else -(-found[at] // degree)
        return found

    def count(self, dims: Dims, *, without: str = "") -> int:
        return prod(self.shape(dims, without=without))

    def bytes(self, tensor: Tensor, *, without: str = "") -> int:
        return self.count(tensor.dims, without=without) * (tensor.width or self.activation)

    def whole(self, tensor: Tensor) -> int:
        """Bytes on one rank of a tensor whose sequence the tensor axis gathers: inside a tensor-parallel region."""
        return self.bytes(tensor, without="tp")


def form(run: Run) -> Form:
    """Whose kept tensors are counted: on a CPU those that our own modules save, else the papers'."""
    ours = run.cluster.device.kind == "cpu" and run.model.family in ("gpt", "hf", "llama", "moe") and not run.train.compile
    return "torch" if ours else "megatron"


def pieces(run: Run, table: Table, split: Split, wires: Wires) -> Pieces:
    """The pieces of a run's model under one split."""
    bytes_of = widths(run.train)
    local = Local(table, split, vocab_multiple=run.model.vocab_multiple, activation=bytes_of.activation)
    by = form(run)
    on = rates(run.cluster.device, run.train)

    def piece(ops: tuple[Op, ...], recompute: str) -> Piece:
        return _piece(ops, recompute, local, split, on, wires, by)

    stream = Tensor(("seq", "batch", "hidden"))
    turns = [tensor for op in table.embedding for tensor in op.saved if "head_dim" in tensor.dims] if by == "torch" else []
    return Pieces(
        embedding=piece(table.embedding, "none"),
        layer=piece(table.layer, split.recompute),
        head=piece(table.head, "none"),
        tied=local.count(("vocab", "hidden")) if table.tied else 0,
        stream=local.bytes(stream),
        angles=sum(map(local.bytes, turns)),
    )


def _piece(
    ops: tuple[Op, ...],
    recompute: str,
    local: Local,
    split: Split,
    on: Rates | None,
    wires: Wires,
    by: Form,
) -> Piece:
    held = [(weight.dims, local.count(weight.dims)) for op in ops for weight in op.weights]
    shards = Axis(name="tp", splits=tp.SPLITS)
    kept, working = _kept(ops, recompute, local, by)
    again = _again(ops, recompute)
    talks = tuple(_talks(ops, again, local, split, by))
    copies = Heads(local.sizes["heads"], local.sizes["kv_heads"], split.tp).copies
    forward = backward = None
    weight = repeated = 0.0
    if on is not None:
        times = [_seconds(op, local, on) for op in ops]
        asked = len(ops) + sum(talk.forward for talk in talks)
        twice = asked if len(again) == len(ops) else len(again)
        repeated = max(sum(time[0] for op, time in zip(ops, times, strict=True) if op in again), twice * on.dispatch)
        forward = max(sum(time[0] for time in times), asked * on.dispatch)
        weight = sum(time[2] for time in times)
        backward = max(sum(time[1] + time[2] for time in times), 2 * asked * on.dispatch) + repeated
    talked = _talked(talks, wires)
    exposed = {
        "tp": (split.tensor_hidden, split.tp),
        "cp": (split.context_hidden, split.cp),
        "ep": (False, 1),
    }
    spoken = [0.0, 0.0]
    for axis, seconds in talked.items():
        hidden, pieces_of_it = exposed[axis]
        for way, computed in enumerate((forward, backward)):
            over = seconds[way]
            if hidden and computed is not None:
                over = max(over / pieces_of_it, over - computed)
            spoken[way] += over
    return Piece(
        dense=sum(count for dims, count in held if "experts" not in dims),
        experts=sum(count for dims, count in held if "experts" in dims),
        replicated=sum(count for dims, count in held if shards.split(dims) is None),
        shared=sum(count for dims, count in held if copies > 1 and shards.split(dims) == "kv_heads"),
        kept=kept,
        working=working,
        logits=sum(local.bytes(tensor) for op in ops for tensor in (op.logits if by == "megatron" else _vocabulary(op))),
        forward=forward,
        backward=backward,
        weight=weight,
        talk_forward=spoken[0],
        talk_backward=spoken[1],
        talks=talks,
    )


def _again(ops: tuple[Op, ...], recompute: str) -> tuple[Op, ...]:
    match recompute:
        case "full":
            return ops
        case "selective":
            return tuple(op for op in ops if op.core)
        case _:
            return ()


def _spoken_again(again: tuple[Op, ...], by: Form) -> tuple[Op, ...]:
    """Of the ops that run again those whose forward messages travel again: all, but torch's checkpoint stops at the last tensor that
    backward wants, before what that op makes is summed."""
    last = max((at for at, op in enumerate(again) if op.saved), default=0)
    stops = by == "torch" and again and (tp.style(again[last]) == "row" or again[last].reduces)
    return again[:last] + again[last + 1 :] if stops else again


def _kept(ops: tuple[Op, ...], recompute: str, local: Local, by: Form) -> tuple[int, int]:
    """(bytes kept from forward to backward, bytes that recomputation adds while it runs): arXiv:2205.05198 table 2."""
    every = sum(local.bytes(tensor) for op in ops for tensor in _held(op, by))
    match recompute:
        case "full":
            kept = local.bytes(Tensor(("seq", "batch", "hidden")))
        case "selective":
            kept = sum(local.bytes(tensor) for op in ops for tensor in _held(op, by) if not op.core)
        case _:
            kept = every
    return kept, every - kept


def _held(op: Op, by: Form) -> Iterator[Tensor]:
    """What an op keeps for backward but for logits: as Megatron keeps it, or as our own modules save it."""
    yield from op.kept if by == "megatron" else (tensor for tensor in op.saved if "vocab" not in tensor.dims)


def _vocabulary(op: Op) -> Iterator[Tensor]:
    """The logits that our own modules save."""
    yield from (tensor for tensor in op.saved if "vocab" in tensor.dims)


def _talks(ops: tuple[Op, ...], again: tuple[Op, ...], local: Local, split: Split, by: Form) -> Iterator[Talk]:
    found: dict[tuple[str, str, int], list[int]] = {}
    spoken = _spoken_again(again, by)
    for op in ops:
        said: list[Iterable[Talk]] = []
        if split.tp > 1:
            said.append(tp.talks(op, local.whole, sequence=split.sequence))
        if split.cp > 1:
            said.append(cp.talks(op, lambda tensor: local.bytes(tensor, without="cp")))
        if split.ep > 1:
            said.append(ep.talks(op, local.whole if by == "torch" else local.bytes))
        for talk in (talk for talks in said for talk in talks):
            row = found.setdefault((talk.axis, talk.verb, talk.payload), [0, 0])
            row[0] += talk.forward
            repeated = op in (again if talk.axis == "ep" else spoken)  # what comes back from the experts is saved
            row[1] += talk.backward + (talk.forward if repeated else 0)
    for (axis, verb, payload), (forward, backward) in found.items():
        yield Talk(axis, verb, payload, forward, backward)


def _talked(talks: tuple[Talk, ...], wires: Wires) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {}
    for talk in talks:
        wired: Wire = getattr(wires, talk.axis)
        _, each = cost(talk.verb, talk.payload, wired)
        row = seconds.setdefault(talk.axis, [0.0, 0.0])
        row[0] += talk.forward * each
        row[1] += talk.backward * each
    return seconds


def _seconds(op: Op, local: Local, on: Rates) -> tuple[float, float, float]:
    """(forward, backward to the inputs, backward to the weights) of an op on one rank for one micro-batch."""
    product = op.product
    if product is None:
        times = 1.0 if on.fused else op.eager
        moved = times * sum(local.bytes(tensor) for tensor in op.moves)
        kernels = times * op.kernels
        return moving_seconds(moved, kernels, on), moving_seconds(POINTWISE_BACKWARD * moved, kernels, on), 0.0
    return _weighted(op, local, on) if op.weights else _attention(op, local, on)


def _weighted(op: Op, local: Local, on: Rates) -> tuple[float, float, float]:
    product = op.product
    assert product is not None
    without = "tp" if tp.style(op) in ("column", "row") else ""  # the rows of a sharded layer are never the sequence's shard
    rows = local.count(product.rows, without=without)
    outer = sum(local.count(dims) for dims in product.outers)
    inner = local.count(product.inner)
    groups = local.count(product.groups)
    rows = -(-rows // max(1, groups)) if groups > 1 else rows
    groups = max(1, groups)
    rate = on.other if any("vocab" in dims for dims in product.outers) else on.linear
    width = local.activation
    return (
        product_seconds(rows, outer, inner, groups, width, rate, on),
        product_seconds(rows, inner, outer, groups, width, rate, on),
        product_seconds(inner, outer, rows, groups, width, rate, on),
    )


def _attention(op: Op, local: Local, on: Rates) -> tuple[float, float, float]:
    """Products without weights: rows are queries (split by cp), the rest is whole; heads split by tp."""
    product = op.product
    assert product is not None
    rows = local.count(product.rows, without="tp")
    inner = local.count(product.inner)
    groups = local.count(product.groups)
    width = local.activation
    if product.fused:
        flops = 2.0 * rows * inner * sum(local.count(dims) for dims in product.outers) * groups * product.computed
        forward = flops / (on.flash * min(1.0, (inner / 128) ** 0.5)) + on.launch
        return forward, product.backward * forward, 0.0
    outer = local.count(product.outers[0])
    forward = product_seconds(rows, outer, inner, groups, width, on.other, on)
    return forward, product.backward * forward, 0.0


def table_of(run: Run) -> Table:
    """The op table of a run's model."""
    return FAMILIES[run.model.family](run.model, run.train)
