"""Expert parallelism: experts split over part of the data axis; tokens travel to them and back (arXiv:2006.16668)."""

from __future__ import annotations

from collections.abc import Iterator

from ...models.ops.op_table import Op
from .axis import Axis, RankTensors
from .message import AxisMessage


def messages(op: Op, on_rank: RankTensors) -> Iterator[AxisMessage]:
    """One all-to-all in forward and one in backward for each exchanged tensor, of the size that the busiest rank receives. Our modules
    route whole sequences on every tensor rank."""
    for tensor in op.exchanges:
        payload = on_rank.bytes(tensor, without="tp") if on_rank.form != "megatron" else on_rank.bytes(tensor)
        yield AxisMessage("ep", "all_to_all", payload, 1, 1)


AXIS = Axis(
    name="ep",
    splits=("experts",),  # their tokens stay as many on each rank while routing is even; else parallel.ep_load says how many one has
    messages=messages,
    within="dp",
    source="arXiv:2006.16668",
)
