"""Seconds of one op on one rank, for one micro-batch."""

from __future__ import annotations

from typing import NamedTuple

from ...models.ops.op_table import Op, Product, is_frozen
from ..axes import tp
from .local_tensors import LocalTensors
from .roofline import GROUPED, POINTWISE_BACKWARD, DeviceRates, cast_seconds, memory_seconds, product_seconds

# Softmax in parts, in float32: cast, scale, mask, softmax, cast back (Megatron-LM's forward_torch_softmax). The kernels that it has more
# than the fused one, and what they move more, as a multiple of the scores: 36 bytes an element for 4.
SOFTMAX_KERNELS, SOFTMAX_MOVES = 4, 16
HEAD_DIM = 0.28  # fused attention of heads smaller than 128 elements loses rate with this power of their size


class OpSeconds(NamedTuple):
    """Seconds of an op: forward, backward to its inputs, backward to its weights."""

    forward: float
    input_gradients: float
    weight_gradients: float


def op_seconds(op: Op, local: LocalTensors, device: DeviceRates) -> OpSeconds:
    """The seconds of an op: a product with weights, one without (attention), or kernels bound by memory."""
    product = op.product
    if op.own_kernels and local.form != "megatron" and not device.even:
        forward, backward = (memory_seconds(sum(map(local.bytes, moved)), 1, device) for moved in op.own_kernels)
        return OpSeconds(forward, backward, 0.0)
    if product is None:
        passes, parts = 1.0 if device.fused else op.eager_passes, softmax_parts(op, local)
        moved = passes * sum(local.bytes(tensor) for tensor in op.moves)
        kernels = passes * op.kernels
        if op.in_fours:
            moved, kernels = moved + parts * SOFTMAX_MOVES * local.bytes(op.moves[0]), kernels + parts * SOFTMAX_KERNELS
        return OpSeconds(memory_seconds(moved, kernels, device), memory_seconds(POINTWISE_BACKWARD * moved, kernels, device), 0.0)
    return _linear(op, product, local, device) if op.weights else _attention(product, local, device)


def softmax_parts(op: Op, local: LocalTensors) -> int:
    """Return 1 for a softmax that Megatron-LM computes in parts, since its fused kernel takes four heads' scores at a time; else 0."""
    if not op.in_fours or local.form != "megatron":
        return 0
    return 1 * (local.count(op.in_fours) % 4 > 0)  # elementwise where the split is of arrays


def op_kernels(op: Op, local: LocalTensors) -> int:
    """Return the kernels of an op on a rank, as the host dispatches them."""
    return op.kernels + softmax_parts(op, local) * SOFTMAX_KERNELS


def _linear(op: Op, product: Product, local: LocalTensors, device: DeviceRates) -> OpSeconds:
    without = "tp" if tp.split_style(op) in ("column", "row") else ""  # a sharded layer multiplies the whole sequence
    rows = local.count(product.rows, without=without)
    outer = sum(local.count(dims) for dims in product.outers)
    inner = local.count(product.inner)
    groups = local.count(product.groups)
    rows = -(-rows // groups)
    is_head = any("vocab" in dims for dims in product.outers)
    rate = (device.other if is_head else device.linear) * GROUPED ** (groups > 1)
    width = local.activation
    forward = product_seconds(rows, outer, inner, groups, width, rate, device)
    if device.even:
        return OpSeconds(forward, forward, 0.0 if is_frozen(op) else forward)
    casts, casts_back = (0.0, 0.0) if is_head else (cast_seconds(rows * groups * each, device) for each in (inner, outer))
    return OpSeconds(
        forward + casts,
        product_seconds(rows, inner, outer, groups, width, rate, device) + casts_back,
        0.0 if is_frozen(op) else product_seconds(inner, outer, rows, groups, width, rate, device),
    )


def _attention(product: Product, local: LocalTensors, device: DeviceRates) -> OpSeconds:
    """Products of activations: rows are queries, split by cp; the keys are whole; heads are split by tp."""
    rows = local.count(product.rows, without="tp")
    inner = local.count(product.inner)
    groups = local.count(product.groups)
    if product.fused:
        flops = 2.0 * rows * inner * sum(local.count(dims) for dims in product.outers) * groups * product.computed
        forward = attention_seconds(flops, inner, device)
        return OpSeconds(forward, product.backward * forward, 0.0)
    outer = local.count(product.outers[0])
    forward = product_seconds(rows, outer, inner, groups, local.activation, device.other, device)
    return OpSeconds(forward, product.backward * forward, 0.0)


def attention_seconds(flops: float, head_dim: int, device: DeviceRates) -> float:
    """Seconds of a fused attention kernel that computes so many FLOPs."""
    return flops / (device.flash * min(1.0, (head_dim / 128) ** HEAD_DIM)) + device.launch
