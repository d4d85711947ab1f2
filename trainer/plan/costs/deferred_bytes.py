"""Bytes that a block's products hold while the gradients of their weights wait (trainer/layers/weight_gradients.py)."""

from __future__ import annotations

from ...models.ops.fp8 import is_cast_output
from ...models.ops.op_table import Op, Product
from ..axes import tp
from .local_tensors import LocalTensors


def deferred_bytes(op: Op, local: LocalTensors) -> int:
    """Return the bytes of an op's input and of its outputs' gradients, from which the gradients of its weights are computed later; 0 where
    backward computes them: where weights are frozen, of a router, which multiplies in float32, and of a head in chunks, which keeps no
    gradient of logits. An input that several products have is held once."""
    product = op.product
    if product is None or product.fused or op.chunks > 1 or "choices" in product.outers[0]:
        return 0
    if all(weight.frozen or weight.name.endswith("bias") for weight in op.weights):
        return 0
    style = tp.split_style(op)
    if "experts" in product.groups:
        return _experts_bytes(op, product, local)
    rows, wide = local.count(product.rows, without="tp" if style else ""), local.activation
    width = 1 if op.in_fp8 else wide
    outputs = [(width if is_cast_output(outer) else wide) * local.count(outer) for outer in product.outers]
    is_mixed = op.in_fp8 and not all(map(is_cast_output, product.outers))  # which holds its input in both forms
    is_shard = local.sequence and style == "column"  # of the input, which is gathered again, and cast then
    shares = op.shares_input or ("one" in product.outers[0] and local.sequence)  # a gate of shared experts; in fp8 they hold their shard
    inputs = 0 if shares else local.count((*product.rows, *product.inner)) * (wide if is_shard else width + wide * is_mixed)
    return inputs + rows * sum(outputs)


def _experts_bytes(op: Op, product: Product, local: LocalTensors) -> int:
    """Return the bytes that a product of experts holds: the rows that they were sent, which every tensor rank has whole, with and without
    sequence parallelism; the gradients of what they make of them; and in int64 the end of each expert's rows, which their first product
    holds for all."""
    rows = tuple("tokens" if dim == "seq" else dim for dim in product.rows)
    inputs = 0 if op.shares_input else local.count((*rows, *product.inner))
    outputs = sum(local.count((*rows, *outer)) for outer in product.outers)
    ends = 8 * local.count(product.groups) if op.name == "experts" else 0
    return local.activation * (inputs + outputs) + ends
