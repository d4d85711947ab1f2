"""The messages of a block's ops on one rank, and which of them are sent again where its ops run again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...models.ops.op_table import Op
from ..axes import tp
from ..axes.axis import ActivationForm
from ..axes.message import AxisMessage
from .number_or_array import is_number
from .pass_seconds import BlockMessage


class OpMessage(NamedTuple):
    """A message of a block's op; whether its axis sums results."""

    op: Op
    sums: bool
    message: AxisMessage


def recomputed_ops(ops: tuple[Op, ...], recompute: str) -> tuple[Op, ...]:
    """The ops that run again in backward."""
    match recompute:
        case "full":
            return ops
        case "selective":
            return tuple(op for op in ops if op.core)
        case _:
            return ()


def _ops_summed_again(again: tuple[Op, ...], form: ActivationForm) -> tuple[Op, ...]:
    """The recomputed ops whose forward sums are sent again.

    Megatron's checkpoint runs all of them. Torch's stops at the last tensor that backward needs: before that op's own result is summed, and
    before the ops behind it, such as the last product of a feed-forward whose weights are frozen.
    """
    if form == "megatron" or not again:
        return again
    last = max((at for at, op in enumerate(again) if op.saves_torch), default=0)
    stops = tp.split_style(again[last]) == "row" or again[last].reduces
    return again[: last if stops else last + 1]


def block_messages(sent: list[OpMessage], again: tuple[Op, ...], form: ActivationForm) -> Iterator[BlockMessage]:
    """The messages of a block's ops on every axis that splits it; equal messages are counted together."""
    counts: dict[tuple[str, str, int], BlockMessage] = {}
    summed_again = _ops_summed_again(again, form)
    for at, (op, sums, message) in enumerate(sent):  # payloads that are arrays are not compared
        repeated = message.forward if again and op in (summed_again if sums else again) else 0
        forward, backward = message.forward, message.backward + repeated
        key = (message.axis, message.verb, message.payload if is_number(message.payload) else -at)
        if equal := counts.get(key):
            forward, backward = equal.message.forward + forward, equal.message.backward + backward
            repeated += equal.repeated
        counts[key] = BlockMessage(AxisMessage(message.axis, message.verb, message.payload, forward, backward), repeated)
    yield from counts.values()
