"""Seconds of one op on one rank, for one micro-batch."""

from __future__ import annotations

from typing import NamedTuple

from ...models.ops.op_table import Op, Product, is_frozen
from ...spec.derived.loss_chunks import chunk_size
from ..axes import tp
from .local_tensors import LocalTensors
from .roofline import GROUPED, POINTWISE_BACKWARD, DeviceRates, cast_seconds, memory_seconds, product_seconds

# Softmax in parts, in float32: cast, scale, mask, softmax, cast back (Megatron-LM's forward_torch_softmax). The kernels that it has more
# than the fused one, and what they move more, as a multiple of the scores: 36 bytes an element for 4.
SOFTMAX_KERNELS, SOFTMAX_MOVES = 4, 16
# Of our products in fp8 (trainer/layers/fp8.py): kernels of a pass that are not compiled, counted on fake CUDA tensors; bytes that these
# move for those of compiled ones, 9 an element for 5; bytes an element of an operand that is copied the other way round.
CAST_KERNELS, EAGER_CAST, TURN_BYTES = 25, 1.8, 2
HEAD_DIM_EXPONENT = 0.28  # fused attention of heads smaller than 128 elements loses rate with this power of their size


class OpSeconds(NamedTuple):
    """Seconds of an op: forward, backward to its inputs, backward to its weights."""

    forward: float
    input_gradients: float
    weight_gradients: float


NOTHING = OpSeconds(0.0, 0.0, 0.0)


class OpParts(NamedTuple):
    """What the seconds of an op consist of: its own kernels; casts to a narrower type; what its backward computes again; the sums of its
    weights' gradients; copies around exchanges between ranks."""

    own: OpSeconds
    casts: OpSeconds = NOTHING
    again: OpSeconds = NOTHING
    sums: OpSeconds = NOTHING
    copies: OpSeconds = NOTHING

    @property
    def total(self) -> OpSeconds:
        """The seconds of all parts."""
        return OpSeconds(*[sum(column) for column in zip(*(each for each in self if each is not NOTHING), strict=True)])


def op_seconds(op: Op, local: LocalTensors, device: DeviceRates, gradient: int) -> OpSeconds:
    """The seconds of an op: a product with weights, one without (attention), or kernels bound by memory.

    Our modules add each micro-batch's gradients of weights, `gradient` bytes wide, to those before.
    """
    return op_parts(op, local, device, gradient).total


def op_parts(op: Op, local: LocalTensors, device: DeviceRates, gradient: int) -> OpParts:
    """The seconds of an op by what they consist of."""
    product, casts = op.product, NOTHING
    if product is None:
        forward, backward = _pointwise_moves(op, local, device)
        kernels = (1.0 if device.fused else op.eager_passes) * op.kernels + softmax_parts(op, local) * SOFTMAX_KERNELS
        own = OpSeconds(memory_seconds(forward, kernels, device), memory_seconds(backward, kernels, device), 0.0)
    elif op.weights:
        own, casts = _linear(op, product, local, device)
    else:
        own = _attention(product, local, device)
    sums = _sum_seconds(op, local, device, gradient) if device.own and op.weights else 0.0
    if op.chunks > 1 and op.weights:
        return _with_all_in_backward(op, own, sums, local, device)
    return OpParts(own, casts, sums=OpSeconds(0.0, 0.0, sums) if device.own and op.weights else NOTHING)


def _with_all_in_backward(op: Op, own: OpSeconds, sums: float, local: LocalTensors, device: DeviceRates) -> OpParts:
    """Seconds of a head in chunks: its backward computes the logits again, adds each chunk's terms to its input's gradient, and can't defer
    its weight's."""
    assert op.product is not None
    rows = local.count(op.product.rows, without="tp") * local.count(op.product.inner)
    added = memory_seconds((op.chunks - 1) * local.activation * rows, 0, device)
    backward = OpSeconds(own.forward, own.input_gradients + own.weight_gradients + added, 0.0)
    return OpParts(backward, again=OpSeconds(0.0, own.forward, 0.0), sums=OpSeconds(0.0, sums, 0.0))


def _pointwise_moves(op: Op, local: LocalTensors, device: DeviceRates) -> tuple[float, float]:
    """Bytes that kernels bound by memory read and write, forward and backward."""
    if device.own and op.own_kernels:
        forward, backward = (sum(map(local.bytes, moved)) for moved in op.own_kernels)
        return forward, backward
    moved = _passes(op, device) * sum(local.bytes(tensor) for tensor in op.moves)
    if op.in_fours:
        moved += softmax_parts(op, local) * SOFTMAX_MOVES * local.bytes(op.moves[0])
    return moved, POINTWISE_BACKWARD * moved


def _passes(op: Op, device: DeviceRates) -> float:
    """How many times the bytes of one fused kernel an op counts: those that its kernels move, or on a CPU could move while they compute."""
    if device.fused:
        return 1.0
    special = op.cpu_passes if device.is_cpu else op.own_passes if device.own else None
    return special or op.eager_passes


def _sum_seconds(op: Op, local: LocalTensors, device: DeviceRates, gradient: int) -> float:
    """Seconds in which a micro-batch's gradients of an op's weights are added to those before, and those of biases are summed over rows."""
    trained = [weight for weight in op.weights if not weight.frozen]
    moved = (local.activation + 2 * gradient) * sum(local.count(weight.dims) for weight in trained)
    biases = [weight for weight in trained if op.product and weight.name.endswith(".bias")]
    rows = local.count(op.product.rows) if op.product else 0
    summed = local.activation * rows * sum(local.count(weight.dims) for weight in biases)
    return memory_seconds(moved + summed, len(trained) + len(biases), device)


def softmax_parts(op: Op, local: LocalTensors) -> int:
    """Return 1 for a softmax that Megatron-LM computes in parts, since its fused kernel takes four heads' scores at a time; else 0."""
    if not op.in_fours or local.form != "megatron":
        return 0
    return 1 * (local.count(op.in_fours) % 4 > 0)  # elementwise where the split is of arrays


def op_kernels(op: Op, local: LocalTensors) -> int:
    """Return the kernels of an op on a rank, as the host dispatches them."""
    casts = CAST_KERNELS * len(op.product.outers) if op.product and op.in_fp8 and local.form == "torch" else 0
    return op.kernels + softmax_parts(op, local) * SOFTMAX_KERNELS + casts


def _linear(op: Op, product: Product, local: LocalTensors, device: DeviceRates) -> tuple[OpSeconds, OpSeconds]:
    """The seconds of a product with weights, and those of casts around it."""
    rows, inner, outer, groups = _sides(op, product, local)
    is_head = any("vocab" in dims for dims in product.outers)
    grouped = 1.0 if device.own and device.is_hopper else GROUPED
    rate = (device.linear if computes_narrow(op, device) else device.other) * grouped ** (groups > 1)
    width = local.activation
    if op.chunks > 1:
        return _chunked_products(op, rows, inner, outer, rate, local, device), NOTHING
    forward = product_seconds(rows, outer, inner, groups, width, rate, device)
    if device.is_cpu:  # the three products take equally long
        return OpSeconds(forward, forward, 0.0 if is_frozen(op) else forward), NOTHING
    own = OpSeconds(
        forward,
        product_seconds(rows, inner, outer, groups, width, rate, device),
        0.0 if is_frozen(op) else product_seconds(inner, outer, rows, groups, width, rate, device),
    )
    if device.own and op.in_fp8:
        return own, _fp8_casts(op, rows, inner, outer, device)
    if is_head or device.own:
        return own, NOTHING
    ahead, back = (cast_seconds(rows * groups * each, device) for each in (inner, outer))
    return own, OpSeconds(ahead, back, 0.0)


def _sides(op: Op, product: Product, local: LocalTensors) -> tuple[int, int, int, int]:
    """The (rows, inner, outer, groups) of a product with weights on a rank; rows are of one group."""
    without = "tp" if tp.split_style(op) in ("column", "row") else ""  # a sharded layer multiplies the whole sequence
    groups = local.count(product.groups)
    rows = -(-local.count(product.rows, without=without) // groups)
    return rows, local.count(product.inner), sum(local.count(dims) for dims in product.outers), groups


def computes_narrow(op: Op, device: DeviceRates) -> bool:
    """Whether an op's products are in the narrowest type of the precision: of our modules those in fp8, else all but the head."""
    if op.product is None or not op.weights:
        return False
    return op.in_fp8 if device.own else not any("vocab" in dims for dims in op.product.outers)


def op_flops(op: Op, local: LocalTensors) -> tuple[float, float]:
    """FLOPs that a rank's products of an op compute, forward and backward: of a causal kernel the half that it computes."""
    product = op.product
    if product is None:
        return 0.0, 0.0
    if op.weights:
        rows, inner, outer, groups = _sides(op, product, local)
        forward = 2.0 * rows * inner * outer * groups
        return forward, forward * (1 if is_frozen(op) else 2)
    forward = _attention_flops(product, local)
    return forward, product.backward * forward


def _attention_flops(product: Product, local: LocalTensors) -> float:
    rows, inner = local.count(product.rows, without="tp"), local.count(product.inner)
    return 2.0 * rows * inner * sum(local.count(dims) for dims in product.outers) * local.count(product.groups) * product.computed


def _chunked_products(op: Op, rows: int, inner: int, outer: int, rate: float, local: LocalTensors, device: DeviceRates) -> OpSeconds:
    """Seconds of the products of a head, one for each chunk of its columns."""
    size, width = chunk_size(outer, op.chunks), local.activation
    sides = ((rows, size, inner), (rows, inner, size), (inner, size, rows))
    forward, inputs, weights = (outer / size * product_seconds(*each, 1, width, rate, device) for each in sides)
    if device.is_cpu:
        inputs = weights = forward
    return OpSeconds(forward, inputs, 0.0 if is_frozen(op) else weights)


def _fp8_casts(op: Op, rows: int, inner: int, outer: int, device: DeviceRates) -> OpSeconds:
    """Seconds of casts around a product of our modules in fp8: of its input, the gradient of its output and, each time, its weight; the
    kernel of each of the three products wants one operand the other way round."""
    passes = 1.0 if device.fused else EAGER_CAST
    turn = memory_seconds(TURN_BYTES * rows * (inner + outer), 2, device)
    casts, casts_back = (passes * cast_seconds(rows * each + inner * outer, device) for each in (inner, outer))
    return OpSeconds(casts + memory_seconds(TURN_BYTES * inner * outer, 1, device), casts_back, 0.0 if is_frozen(op) else turn)


def _attention(product: Product, local: LocalTensors, device: DeviceRates) -> OpSeconds:
    """Products of activations: rows are queries, split by cp; the keys are whole; heads are split by tp."""
    rows = local.count(product.rows, without="tp")
    inner = local.count(product.inner)
    groups = local.count(product.groups)
    if product.fused:
        flops = _attention_flops(product, local)
        keys = local.count(product.outers[0]) * product.span
        forward, backward = attention_seconds(flops, inner, keys, product.backward, device)
        calls = product.documents * local.sizes["batch"] * device.call
        return OpSeconds(forward + calls, backward + product.backward * calls, 0.0)
    outer = local.count(product.outers[0])
    width, rate = (4, device.float32) if product.in_float32 and device.own else (local.activation, device.other)
    width = 0 if product.moved_apart and device.own else width
    each = product_seconds(rows, outer, inner, groups, width, rate, device)
    forward = len(product.outers) * product.computed * each
    return OpSeconds(forward, product.backward * forward, 0.0)


def attention_seconds(flops: float, head_dim: int, keys: float, backward: float, device: DeviceRates) -> tuple[float, float]:
    """Seconds of a fused attention kernel that computes so many FLOPs forward, and `backward` times as many backward, for documents of so
    many `keys`."""
    whole = flops / head_dim_share(head_dim)
    ahead, back = ((1 + wasted / keys) / (1 + wasted / device.flash_keys) for wasted in device.flash_tokens)
    return whole * ahead / device.flash + device.launch, backward * (whole * back / device.flash_backward + device.launch)


def head_dim_share(head_dim: int) -> float:
    """The share of its rate at 128 elements that fused attention reaches with heads of `head_dim` elements."""
    return float(min(1.0, (head_dim / 128) ** HEAD_DIM_EXPONENT))
