"""Bytes that a block's passes hold for a moment, beside those that are saved for backward.

Backward runs the ops in reverse: while an op runs, its result's gradient, its inputs' gradients and its weight's new gradient are alive,
and what later ops saved is freed. Counted on fake CUDA tensors (scripts/trace_cuda).
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

from ...models.ops.op_table import Op, Tensor
from ...spec.derived.loss_chunks import chunk_size
from ..axes import tp
from .local_tensors import LocalTensors, logits_bytes, saved_bytes
from .number_or_array import larger

LOGITS_AT_A_TIME = 1 << 20  # that the loss makes float32 on a CPU (trainer/layers/cross_entropy.py)
CHUNK_TENSORS, ONE_CHUNK_TENSORS = 3, 2  # float32 tensors of a chunk: a result and an operand, beside the softmax of the chunk before
RANDOM_BITS = 12  # bytes an element of a dropout mask while it is drawn: three int32 tensors


class OpBytes(NamedTuple):
    """Bytes of an op: those that it saves for backward, logits apart, and those that its backward and its forward hold while they run."""

    saved: int
    logits: int
    backward: int
    forward: int


def op_bytes(op: Op, local: LocalTensors, device: str) -> OpBytes:
    """The bytes of an op of a block on one rank, for one micro-batch, on a kind of device."""
    return OpBytes(saved_bytes(op, local), logits_bytes(op, local), _backward_bytes(op, local, device), _forward_bytes(op, local))


def block_temporary_bytes(ops: list[OpBytes], again: list[bool], stream: int, *, residual: bool) -> int:
    """The most bytes that one micro-batch's passes through a block hold beside all that its blocks save.

    `again`: whether backward runs each op again. `stream`: bytes of the hidden states; `residual`: the gradient of the block's result is
    kept for a residual stream. Where a dropout ends the block, its backward scales that gradient before it asks for the mask, with which
    ops begin to run again.
    """
    kept = stream if residual else 0
    waiting = kept + kept * (ops[-1].forward > 0) if ops and all(again) else kept
    saved_again = sum([op.saved for op, repeats in zip(ops, again, strict=True) if repeats])
    freed, most = 0, 0
    if all(again):
        saved_again -= stream  # the block's input is saved in any case
    for op, repeats in zip(reversed(ops), reversed(again), strict=True):
        alive = (saved_again if repeats else 0) - freed
        most = larger(most, larger(alive + kept + op.backward, alive - op.saved + op.forward + waiting * repeats))
        if repeats:
            saved_again -= op.saved
        else:
            freed += op.saved + op.logits
    return most


def later_backward_bytes(modules: int, blocks: list[tuple[int, int]], weight: int, *, tied: bool) -> int:
    """The most bytes that the passes of the head and of the modules behind it hold beside all that they save; `blocks` are what the head
    and each block of a module hold for a moment, and what they save. `weight`: bytes of the head's weight, and of the embedding's, which
    may be `tied`.

    Backward runs the last module first. From then on the gradient of the head's weight waits for those of the other uses, and so does that
    of the embedding's; each further one and its sum with those before are two more.
    """
    head, *of_module = blocks
    freed = waiting = most = 0
    for at in range(modules):
        for place, (temporary, saved) in enumerate(reversed(of_module)):
            most, freed = larger(most, temporary + waiting - freed), freed + saved
            if place == 0:
                most, waiting = larger(most, waiting + 2 * weight * (at > 0) - freed), waiting + weight * (at == 0)
        most = larger(most, waiting + weight * (1 + (tied or at > 0)) - freed)
        waiting += weight * (at == 0 and not tied)
    most, freed = larger(most, head[0] + waiting - freed), freed + head[1]
    return larger(most, waiting + 2 * weight - freed)


def _backward_bytes(op: Op, local: LocalTensors, device: str) -> int:
    """Bytes of the gradients that an op's backward reads and makes."""
    product, width = op.product, local.activation
    if op.holds:
        return sum(map(local.bytes, op.holds))
    if product is None and op.chunks > 1:
        return 0  # the head's backward is the loss's too
    if product is None:
        logits = next((tensor for tensor in op.saves_torch if "vocab" in tensor.dims), None)
        return _loss_bytes(logits, local, device) if logits else sum(map(local.bytes, op.moves))
    groups = local.count(tuple(dim for dim in product.groups if dim != "experts"))  # experts share the rows
    whole = local.count(product.rows, without="tp") * groups
    inner = local.count(product.inner)
    if product.fused:
        return 2 * _scores_bytes(op, local) + 4 * width * whole * inner  # of queries, keys, values and the result
    outer = sum(map(local.count, product.outers))
    inputs, of_loss = 1, 0
    if op.chunks > 1:
        outer = chunk_size(outer, op.chunks)
        of_loss = _float32_bytes(whole * outer, outer) if device == "cpu" else 0
    if local.sequence and tp.split_style(op) == "column":  # the gathered input too, and of several sequences a copy in the order of ranks
        inputs = 2 + (local.sizes["batch"] > 1) * (op.chunks == 1)
    weights = reduce(larger, [local.count(weight.dims) for weight in op.weights if not weight.frozen], 0)
    return width * (whole * (outer + inputs * inner) + weights) + of_loss


def _loss_bytes(logits: Tensor, local: LocalTensors, device: str) -> int:
    """Bytes of the logits' gradient: on a GPU it takes the logits' place, on a CPU it is made from some rows in float32 at a time."""
    if device != "cpu":
        return 0
    return local.bytes(logits) + _float32_bytes(local.count(logits.dims), local.count(("vocab",)))


def _float32_bytes(elements: int, row: int) -> int:
    """Bytes of the float32 tensors from which a CPU makes the gradient of so many logits, `row` of each token."""
    chunk = larger(1, LOGITS_AT_A_TIME // row) * row
    return 4 * (CHUNK_TENSORS * chunk * (chunk < elements) + ONE_CHUNK_TENSORS * elements * (chunk >= elements))


def _forward_bytes(op: Op, local: LocalTensors) -> int:
    """Bytes that softmax reads and makes in forward, or those of a dropout's input and of the random bits from which its mask is made."""
    masks = () if op.in_fp8 else [tensor for tensor in op.saves_torch if tensor.width == 1]
    masked = reduce(larger, [local.count(tensor.dims) for tensor in masks], 0)
    if tensor := _scores(op):
        scores = local.bytes(tensor)
        return scores + larger(scores, RANDOM_BITS * masked)
    return (local.activation + RANDOM_BITS) * masked


def _scores_bytes(op: Op, local: LocalTensors) -> int:
    return local.bytes(tensor) if (tensor := _scores(op)) else 0


def _scores(op: Op) -> Tensor | None:
    """The scores where attention's core saves their softmax: with dropout a fused core is separate kernels too."""
    return next((tensor for tensor in op.saves_torch if op.core and "keys" in tensor.dims), None)
