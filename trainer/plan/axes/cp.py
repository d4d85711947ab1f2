"""Context parallel: the sequence split throughout; keys and values gathered for attention (arXiv:2407.21783 section 3.3.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...models.table import Op, Tensor
from .axis import Axis
from .message import Talk


def axis() -> Axis:
    """The axis; of the scores it splits the queries, not the keys."""
    return Axis(name="cp", splits=("seq", "tokens"))


def talks(op: Op, gathered: Callable[[Tensor], int]) -> Iterator[Talk]:
    """Keys and values of the whole sequence are gathered for forward, again for backward, and their gradients scattered.

    `gathered` gives the bytes of a tensor on one rank, were this axis not to split it.
    """
    product = op.product
    if op.name == "attention" and product is not None:
        taken = sum(gathered(Tensor(product.rows + outer)) for outer in product.outers if "kv_heads" in outer)
        yield Talk("cp", "all_gather", taken, 1, 1)
        yield Talk("cp", "reduce_scatter", taken, 0, 1)
