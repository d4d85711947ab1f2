"""Tensor parallelism: heads, feed-forward and vocabulary are split, the sequence elsewhere (arXiv:1909.08053, 2205.05198)."""

from __future__ import annotations

from collections.abc import Iterator

from ...models.ops.op_table import Op, Tensor, is_frozen
from .axis import Axis, RankTensors
from .collectives import Wire, collective_cost
from .message import AxisMessage
from .traffic_row import TrafficRow
from .weight_slices import TENSOR_DIMS, local_tensor_dims


def split_style(op: Op) -> str | None:
    """How an op's weights are sharded: by `column`, by `row`, by `vocab` (rows of an embedding), by `heads` (of a norm of all heads); None:
    every rank holds them whole."""
    if op.product is None:
        split = {AXIS.split_dim(weight.dims) for weight in op.weights} - {None}
        return None if not split else "vocab" if "vocab" in split else "heads"
    if not op.weights:
        return None
    if AXIS.split_dim(op.product.inner):
        return "row"
    return "column" if any(AXIS.split_dim(outer) for outer in op.product.outers) else None


def messages(op: Op, on_rank: RankTensors) -> Iterator[AxisMessage]:
    """Megatron's f and g around an op (arXiv:1909.08053 section 3): f is an all-reduce in backward, g one in forward.

    With sequence parallelism each is an all-gather and a reduce-scatter, and a column layer, which keeps only its shard of the input,
    gathers it again for the gradients of its weights (arXiv:2205.05198 section 4.2.2), or to compute logits again. Around experts f stands
    before tokens are copied, g after the copies are added up.
    """
    product = op.product
    for tensor in op.enters:
        yield from _enter(on_rank, tensor)
    match None if product and "experts" in product.groups else split_style(op):
        case "column":
            assert product is not None
            yield from _enter(on_rank, Tensor(product.rows + product.inner), again=0 if is_frozen(op) and op.chunks == 1 else 1)
        case "row":
            assert product is not None
            yield from _leave(on_rank, Tensor(product.rows + product.outers[0]))
    for tensor in () if on_rank.sequence else op.partial:
        yield AxisMessage("tp", "all_reduce", on_rank.bytes(tensor), 0, 1)
    for tensor in op.sums:
        yield AxisMessage("tp", "all_reduce", on_rank.bytes(tensor, without="tp"), 1, 1)
    for dim, result in op.reduces:
        if dim not in TENSOR_DIMS:
            continue
        if result.width is None:
            yield from _leave(on_rank, result, has_backward=not is_frozen(op))
        else:
            yield AxisMessage("tp", "all_reduce", on_rank.bytes(result, without="tp"), 1, 0)


def update_sum(group: str, payload: int, wire: Wire, updates: int) -> TrafficRow:
    """The all-reduce, at each of a step's updates, of gradients of which several tensor-parallel ranks hold a part each."""
    sent, seconds = collective_cost("all_reduce", payload, wire)
    return TrafficRow(group, "all_reduce", payload, updates, sent * updates, wire.link, seconds * updates, seconds * updates)


def _enter(on_rank: RankTensors, tensor: Tensor, *, again: int = 0) -> Iterator[AxisMessage]:
    """Megatron's f: the input of a split region. `again`: how often backward gathers it again."""
    payload = on_rank.bytes(tensor, without="tp")
    if on_rank.sequence:
        yield AxisMessage("tp", "all_gather", payload, 1, again)
        yield AxisMessage("tp", "reduce_scatter", payload, 0, 1)
    else:
        yield AxisMessage("tp", "all_reduce", payload, 0, 1)


def _leave(on_rank: RankTensors, tensor: Tensor, *, has_backward: bool = True) -> Iterator[AxisMessage]:
    """Megatron's g: the sum of a split region's result. The gradients of a frozen embedding's are not taken."""
    payload = on_rank.bytes(tensor, without="tp")
    if on_rank.sequence:
        yield AxisMessage("tp", "reduce_scatter", payload, 1, 0)
        if has_backward:
            yield AxisMessage("tp", "all_gather", payload, 0, 1)
    else:
        yield AxisMessage("tp", "all_reduce", payload, 1, 0)


AXIS = Axis(
    name="tp",
    splits=TENSOR_DIMS,
    sequence_splits=("seq",),
    messages=messages,
    rank_sizes=local_tensor_dims,
    overlap="tensor",
    sums_results=True,
    layers_only=True,
    source="arXiv:1909.08053, 2205.05198",
)
