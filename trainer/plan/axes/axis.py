"""A mesh axis as data: one row of `AXES`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ...models.ops.op_table import Dims, Op, Tensor
from ...spec.run import Parallel
from .message import AxisMessage

# Whose saved activations are counted: the papers', those of our torch modules, or those of our compiled layers and the loss that is not.
ActivationForm = Literal["megatron", "torch", "compiled"]


class RankTensors(Protocol):
    """Tensors of one block on one rank, for one micro-batch."""

    @property
    def sequence(self) -> bool:
        """Whether the tensor axis is sequence parallel."""

    @property
    def form(self) -> ActivationForm:
        """Whose saved activations are counted."""

    def bytes(self, tensor: Tensor, *, without: str = "") -> int:
        """Bytes of a tensor on one rank, if the axis `without` did not split it."""


@dataclass(frozen=True, kw_only=True, eq=False)  # rows are compared by identity: they are keys of caches
class Axis:
    """One axis of the mesh. `name` is also its name in plans and traffic rows, and its degree is the config key `parallel.NAME`.

    An axis splits the first dim of a tensor that is in `splits`. Under sequence parallelism it splits a tensor that has none of them
    along the first dim that is in `sequence_splits`. An axis without `messages` splits no block: one is costed for one
    micro-batch (dp) and one layer (pp).
    """

    name: str
    splits: Dims
    source: str
    sequence_splits: Dims = ()
    messages: Callable[[Op, RankTensors], Iterator[AxisMessage]] | None = None  # of an op; None: the axis splits no block
    rank_sizes: Callable[[Mapping[str, int], int, int], Mapping[str, int]] | None = None
    """(sizes, degree, vocab_multiple) -> elements on one rank along the dims that it splits; None: equal shares, rounded up."""
    within: str | None = None  # the axis whose inner ranks form this one's groups; None: the axis has its own position in the mesh order
    data: bool = False  # its ranks hold the same weights: gradients are summed and ZeRO shards over it
    overlap: str | None = None  # the field of parallel.overlap that hides its messages under computation
    never_hidden: tuple[str, ...] = ()  # verbs of its messages that nothing hides, whatever `overlap` says
    sums_results: bool = False  # it sums an op's result after forward, which recomputation may leave out
    layers_only: bool = False  # only our layers send on its process group; else an engine does too

    @property
    def key(self) -> str:
        """The config key of its degree."""
        return f"parallel.{self.name}"

    def degree(self, parallel: Parallel) -> Any:
        """Its number of ranks, or `auto`."""
        return getattr(parallel, self.name)

    def hides_messages(self, parallel: Parallel) -> bool:
        """Whether its messages overlap with computation."""
        return self.overlap is not None and bool(getattr(parallel.overlap, self.overlap))

    def split_dim(self, dims: Dims, *, sequence: bool = False) -> str | None:
        """The dim of a tensor that this axis splits; None where each of its ranks holds the whole tensor."""
        for dim in dims:
            if dim in self.splits:
                return dim
        if sequence:
            for dim in dims:
                if dim in self.sequence_splits:
                    return dim
        return None
