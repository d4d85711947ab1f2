"""Which part of each logical weight a rank holds: read off the op table's dims and the tensor axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ..models.table import Parameter, padded
from .axes.tp import SPLITS
from .divisors import least_divisor


@dataclass(frozen=True, slots=True)
class Portion:
    """Along one dim a rank holds logical elements offset <= i < offset + length, in a tensor of `size`: the rest is 0.

    `copy` of `copies`: so many tensor-parallel ranks hold the same elements, and this is one of them.
    """

    offset: int
    length: int
    size: int
    copy: int = 0
    copies: int = 1

    def times(self, inner: int) -> Portion:
        """The same of a dim in which each element is `inner` elements."""
        return Portion(self.offset * inner, self.length * inner, self.size * inner, self.copy, self.copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One weight on one rank: of the logical tensor `shape` the block of `length` at `offset`, held in the first corner of a
    tensor of `size`, in which all else is 0.

    `copy` of `copies`: so many ranks of the tensor axis hold the same block. `shared`: it is split, and yet several ranks hold
    the same (key and value heads fewer than ranks), each with a part of its gradient. `expert`: expert ranks have other parts of it.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    length: tuple[int, ...]
    size: tuple[int, ...]
    copy: int
    copies: int
    shared: bool
    expert: bool = False

    @property
    def sharded(self) -> bool:
        """Whether the tensor axis splits it."""
        return self.copies == 1 or self.shared

    @property
    def filled(self) -> bool:
        """Whether all of the tensor is logical, none of it padding."""
        return self.length == self.size


class Heads:
    """How heads lie on the ranks of the tensor axis.

    Key and value heads as many as ranks or more: each rank has an equal run of them and the query heads that they serve. Fewer:
    `copies` ranks share one, and its query heads. What does not divide is padded at the end of a rank's run.
    """

    def __init__(self, heads: int, kv_heads: int, degree: int) -> None:
        self.heads, self.kv_heads = heads, kv_heads
        self.group = heads // kv_heads
        if kv_heads >= degree:
            self.lanes, self.copies, self.kv_size = degree, 1, -(-kv_heads // degree)
            self.size = self.kv_size * self.group
        else:
            self.lanes = least_divisor(degree, kv_heads)
            self.copies, self.kv_size = degree // self.lanes, 1
            self.size = -(-self.group // self.copies)

    @property
    def idle(self) -> int:
        """Ranks that have no query heads."""
        if self.copies == 1:
            return self.lanes - -(-self.heads // self.size)
        return self.kv_heads * (self.copies - -(-self.group // self.size)) + (self.lanes - self.kv_heads) * self.copies

    def query(self, rank: int) -> Portion:
        """The query heads of a rank."""
        if self.copies == 1:
            return _run(self.heads, rank * self.size, self.size)
        lane, part = divmod(rank, self.copies)
        first = lane * self.group
        last = min(first + self.group, self.heads)
        return _run(last, min(last, first + part * self.size), self.size)

    def key(self, rank: int) -> Portion:
        """The key and value heads of a rank."""
        lane, copy = divmod(rank, self.copies)
        run = _run(self.kv_heads, lane * self.kv_size, self.kv_size)
        return Portion(run.offset, run.length, run.size, copy, self.copies)


def _run(whole: int, first: int, size: int) -> Portion:
    """Of `whole` elements the `size` from `first`, as far as there are so many."""
    offset = min(first, whole)
    return Portion(offset, max(0, min(whole, first + size) - offset), size)


def portion(dim: str, size: Mapping[str, int], degree: int, rank: int, *, vocab_multiple: int = 1) -> Portion:
    """What a rank of the tensor axis holds along a logical dim that the axis splits."""
    whole = size[dim]
    match dim:
        case "heads":
            return Heads(whole, size["kv_heads"], degree).query(rank)
        case "kv_heads":
            return Heads(size["heads"], whole, degree).key(rank)
        case "vocab":
            each = padded(whole, vocab_multiple * degree) // degree
        case _:
            each = -(-whole // degree)
    return _run(whole, rank * each, each)


def idle_ranks(dim: str, size: Mapping[str, int], degree: int, *, vocab_multiple: int = 1) -> int:
    """Ranks of the tensor axis that have nothing along a dim but padding."""
    if dim == "heads":
        return Heads(size["heads"], size["kv_heads"], degree).idle
    each = portion(dim, size, degree, 0, vocab_multiple=vocab_multiple).size
    return degree - -(-size[dim] // each)


def local_sizes(size: Mapping[str, int], degree: int, *, vocab_multiple: int = 1) -> dict[str, int]:
    """Elements along each logical dim on one rank of the tensor axis: of those that it splits, its part with padding."""
    split = {dim: portion(dim, size, degree, 0, vocab_multiple=vocab_multiple).size for dim in SPLITS if dim in size}
    return {**size, **split}


def placed(
    parameter: Parameter, size: Mapping[str, int], degree: int, rank: int, *, vocab_multiple: int = 1, ep: int = 1, expert_rank: int = 0
) -> Placed:
    """What a rank of the tensor axis holds of a weight: the axis splits the first of its dims that it can, the `ep` expert ranks
    share out stacks of experts."""
    rows: list[Portion] = []
    split = False
    for dims in parameter.dims:
        inner = prod(size[dim] for dim in dims[1:])
        if dims and dims[0] in SPLITS and not split:
            split = True
            rows.append(portion(dims[0], size, degree, rank, vocab_multiple=vocab_multiple).times(inner))
        elif dims == ("experts",):
            each = size["experts"] // ep
            rows.append(Portion(expert_rank * each, each, each))
        else:
            whole = prod(size[dim] for dim in dims)
            rows.append(Portion(0, whole, whole))
    copy, copies = next(((row.copy, row.copies) for row in rows if row.copies > 1), (0, 1) if split else (rank, degree))
    return Placed(
        name=parameter.name,
        shape=parameter.shape(size),
        offset=tuple(row.offset for row in rows),
        length=tuple(row.length for row in rows),
        size=tuple(row.size for row in rows),
        copy=copy,
        copies=copies,
        shared=split and copies > 1,
        expert=ep > 1 and ("experts",) in parameter.dims,
    )
