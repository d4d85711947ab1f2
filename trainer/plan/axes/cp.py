"""Context parallelism: every rank holds a part of each sequence; keys and values are gathered (arXiv:2407.21783 section 3.3.2), or tokens
exchanged for heads (arXiv:2309.14509)."""

from __future__ import annotations

from collections.abc import Iterator

from ...models.ops.op_table import Op
from .axis import Axis, RankTensors
from .message import AxisMessage


def messages(op: Op, on_rank: RankTensors) -> Iterator[AxisMessage]:
    """All-gather the keys and values of the whole sequence for forward and again for backward; reduce-scatter their gradients. Or exchange
    queries, keys and values in one all-to-all, and values in another; so their gradients. All-reduce the log probabilities of answers."""
    if op.gathers:
        payload = sum(on_rank.bytes(tensor, without="cp") for tensor in op.gathers)
        yield AxisMessage("cp", "all_gather", payload, 1, 1)
        yield AxisMessage("cp", "reduce_scatter", payload, 0, 1)
    for dim, result in op.reduces:
        if dim in AXIS.splits:
            yield AxisMessage("cp", "all_reduce", on_rank.bytes(result), 1, 0)
    if op.head_exchanges:
        yield AxisMessage("cp", "all_to_all", sum(map(on_rank.bytes, op.head_exchanges)), 1, 1)


AXIS = Axis(
    name="cp",
    splits=("seq", "tokens", "core_heads", "core_kv_heads", "core_linear_keys"),  # of scores the queries; the keys, dim `keys`, are whole
    messages=messages,
    data=True,
    overlap="context",
    never_hidden=("all_to_all",),
    layers_only=True,
    source="arXiv:2407.21783",
)
