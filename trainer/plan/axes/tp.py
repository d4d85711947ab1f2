"""Tensor parallel: heads, feed-forward and vocabulary split, and the sequence elsewhere (arXiv:1909.08053, 2205.05198)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...models.table import Dims, Op, Tensor
from ..collectives import Wire, cost
from .axis import Axis
from .message import Talk
from .traffic_row import Line

SPLITS: Dims = ("heads", "kv_heads", "ffn", "expert_ffn", "shared_ffn", "vocab")

Bytes = Callable[[Tensor], int]  # bytes of a tensor on one rank, were this axis not to split its sequence


def axis(*, sequence: bool) -> Axis:
    """The axis, splitting the sequence of what nothing else splits where sequence parallel is on."""
    return Axis(name="tp", splits=SPLITS, otherwise=("seq",) if sequence else ())


def style(op: Op) -> str | None:
    """How an op's weights are sharded: by `column`, by `row`, by `vocab` (rows of a table); None where each rank has all."""
    shards = Axis(name="tp", splits=SPLITS)
    if op.product is None:
        return "vocab" if any(shards.split(weight.dims) for weight in op.weights) else None
    if not op.weights:
        return None
    if shards.split(op.product.inner):
        return "row"
    return "column" if any(shards.split(outer) for outer in op.product.outers) else None


def talks(op: Op, whole: Bytes, *, sequence: bool) -> Iterator[Talk]:
    """Megatron's f and g around an op: f costs backward an all-reduce, g forward one; with sequence parallel each is a
    gather and a reduce-scatter, and a column layer, which keeps but its shard of the input, gathers it again in backward. Around
    experts they stand before tokens are copied and after the copies are added up."""
    product = op.product
    for tensor in op.enters:
        yield from _given(whole(tensor), sequence=sequence)
    match None if product and "experts" in product.groups else style(op):
        case "column":
            assert product is not None
            taken = whole(Tensor(product.rows + product.inner))
            if sequence:
                yield Talk("tp", "all_gather", taken, 1, 1)
                yield Talk("tp", "reduce_scatter", taken, 0, 1)
            else:
                yield Talk("tp", "all_reduce", taken, 0, 1)
        case "row":
            assert product is not None
            yield from _summed(whole(Tensor(product.rows + product.outers[0])), sequence=sequence)
    for dim, result in op.reduces:
        if dim not in SPLITS:
            continue
        if result.width is None:
            yield from _summed(whole(result), sequence=sequence)
        else:
            yield Talk("tp", "all_reduce", whole(result), 1, 0)


def once(axis: str, payload: int, wire: Wire) -> Line:
    """Gradients that several ranks of the tensor axis have a part of: added up once a step, in one message."""
    sent, seconds = cost("all_reduce", payload, wire)
    return Line(axis, "all_reduce", payload, 1, sent, wire.link, seconds, seconds)


def _given(taken: int, *, sequence: bool) -> Iterator[Talk]:
    if sequence:
        yield Talk("tp", "all_gather", taken, 1, 0)
        yield Talk("tp", "reduce_scatter", taken, 0, 1)
    else:
        yield Talk("tp", "all_reduce", taken, 0, 1)


def _summed(given: int, *, sequence: bool) -> Iterator[Talk]:
    if sequence:
        yield Talk("tp", "reduce_scatter", given, 1, 0)
        yield Talk("tp", "all_gather", given, 0, 1)
    else:
        yield Talk("tp", "all_reduce", given, 1, 0)
