"""Expert parallel: experts split over part of the data axis; tokens travel to them and back (arXiv:2006.16668)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...models.table import Op, Tensor
from .axis import Axis
from .message import Talk


def axis() -> Axis:
    """The axis; it splits stacks of experts, whose tokens stay as many a rank while routing is balanced."""
    return Axis(name="ep", splits=("experts",))


def talks(op: Op, local: Callable[[Tensor], int]) -> Iterator[Talk]:
    """Each exchange is an all-to-all in forward and one in backward; `local` gives the bytes of a tensor on one rank."""
    for tensor in op.exchanges:
        yield Talk("ep", "all_to_all", local(tensor), 1, 1)
