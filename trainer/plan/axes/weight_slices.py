"""Shards of the logical weights: which part of each a rank holds, from the op table's dims and the tensor and expert axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from ...models.ops.op_table import Dims, Parameter, round_up
from ...spec.derived.weight_decay import is_decayed
from ...spec.numbers.divisors import least_divisor

# Dims that the tensor axis splits
LINEAR_DIMS: Dims = ("linear_keys", "core_linear_keys")  # key heads of linear attention
TENSOR_DIMS: Dims = ("heads", "kv_heads", "core_heads", "core_kv_heads", "ffn", "expert_ffn", "shared_ffn", *LINEAR_DIMS, "vocab")

TensorCopies = Literal["", "replicated", "shared"]  # other ranks of the tensor axis that hold a weight too: none, all, some


@dataclass(frozen=True, slots=True)
class DimShard:
    """A rank's elements along one dim: logical elements offset <= i < offset + length, padded with zeros to `size`.

    `copies` tensor-parallel ranks hold the same elements; this is number `copy` of them.
    """

    offset: int
    length: int
    size: int
    copy: int = 0
    copies: int = 1

    def times(self, inner: int) -> DimShard:
        """The shard of a flattened dim, in which each element of this one stands for `inner` elements."""
        return DimShard(self.offset * inner, self.length * inner, self.size * inner, self.copy, self.copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShard:
    """One weight on one rank: the block of `length` at `offset` of the logical tensor `shape`, padded with zeros at its end to `size`.

    `copies` ranks of the tensor axis hold the same block; this is number `copy` of them. `shared`: the weight is split, but several
    ranks hold the same block (fewer key and value heads than ranks), each with a part of its gradient. `expert`: expert ranks hold
    other blocks of it. `hidden_matrix`: Muon steps it; its last two dims are those of a matrix, a first one numbers experts.
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
    hidden_matrix: bool = False

    @property
    def is_split(self) -> bool:
        """Whether the tensor axis splits the weight."""
        return self.copies == 1 or self.shared

    @property
    def decays(self) -> bool:
        """Whether weight decay applies to it."""
        return is_decayed(self.name, len(self.size))

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the whole matrix, of one for each expert."""
        rows, columns = self.shape[-2:]
        return rows, columns


class HeadShards:
    """Attention heads on the ranks of the tensor axis.

    With at least as many key and value heads as ranks, each rank has an equal run of them and the query heads that they serve. With
    fewer, `copies` ranks hold the same one and share out its query heads. A run that does not divide is padded at its end.
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
    def are_padded(self) -> bool:
        """Whether some rank has query heads that are padding."""
        return self.lanes * self.copies * self.size > self.heads

    @property
    def idle_ranks(self) -> int:
        """Ranks without query heads."""
        if self.copies == 1:
            return self.lanes - -(-self.heads // self.size)
        return self.kv_heads * (self.copies - -(-self.group // self.size)) + (self.lanes - self.kv_heads) * self.copies

    def query_shard(self, rank: int) -> DimShard:
        """The query heads of a rank."""
        if self.copies == 1:
            return _clipped_shard(self.heads, rank * self.size, self.size)
        lane, part = divmod(rank, self.copies)
        first = lane * self.group
        last = min(first + self.group, self.heads)
        return _clipped_shard(last, min(last, first + part * self.size), self.size)

    def kv_shard(self, rank: int) -> DimShard:
        """The key and value heads of a rank."""
        lane, copy = divmod(rank, self.copies)
        run = _clipped_shard(self.kv_heads, lane * self.kv_size, self.kv_size)
        return DimShard(run.offset, run.length, run.size, copy, self.copies)


def has_padded_heads(sizes: Mapping[str, int], degree: int) -> int:
    """1 where some of so many ranks of the tensor axis have query heads that are padding."""
    return int("heads" in sizes and HeadShards(sizes["heads"], sizes["kv_heads"], degree).are_padded)


def _clipped_shard(whole: int, first: int, size: int) -> DimShard:
    """The `size` elements from `first`, as far as they are below `whole`."""
    offset = min(first, whole)
    return DimShard(offset, max(0, min(whole, first + size) - offset), size)


def dim_shard(dim: str, size: Mapping[str, int], degree: int, rank: int, *, vocab_multiple: int = 1) -> DimShard:
    """A tensor-parallel rank's elements along a logical dim that the tensor axis splits."""
    whole = size[dim]
    match dim:
        case "heads" | "core_heads":
            return HeadShards(whole, size["kv_heads"], degree).query_shard(rank)
        case "kv_heads" | "core_kv_heads":
            return HeadShards(size["heads"], whole, degree).kv_shard(rank)
        case "vocab":
            each = round_up(whole, vocab_multiple * degree) // degree
        case _:
            each = -(-whole // degree)
    return _clipped_shard(whole, rank * each, each)


def idle_ranks(dim: str, size: Mapping[str, int], degree: int, *, vocab_multiple: int = 1) -> int:
    """Ranks of the tensor axis that hold only padding along a dim."""
    if dim == "heads":
        return HeadShards(size["heads"], size["kv_heads"], degree).idle_ranks
    each = dim_shard(dim, size, degree, 0, vocab_multiple=vocab_multiple).size
    return degree - -(-size[dim] // each)


def local_tensor_dims(size: Mapping[str, int], degree: int, vocab_multiple: int) -> dict[str, int]:
    """Elements, with padding, on one rank of the tensor axis along each dim that it splits."""
    return {dim: dim_shard(dim, size, degree, 0, vocab_multiple=vocab_multiple).size for dim in TENSOR_DIMS if dim in size}


def local_sizes(size: Mapping[str, int], degree: int, *, vocab_multiple: int = 1) -> dict[str, int]:
    """Elements, with padding, on one rank of the tensor axis along every logical dim."""
    return {**size, **local_tensor_dims(size, degree, vocab_multiple)}


def weight_shard(
    parameter: Parameter, size: Mapping[str, int], degree: int, rank: int, *, vocab_multiple: int = 1, ep: int = 1, expert_rank: int = 0
) -> WeightShard:
    """A rank's shard of a weight: the tensor axis splits the first dim that is in `TENSOR_DIMS`, the `ep` expert ranks share out the
    experts."""
    shards: list[DimShard] = []
    split = False
    for dims in parameter.dims:
        inner = prod(size[dim] for dim in dims[1:])
        if dims and dims[0] in TENSOR_DIMS and not split:
            split = True
            shards.append(dim_shard(dims[0], size, degree, rank, vocab_multiple=vocab_multiple).times(inner))
        elif dims == ("experts",):
            each = size["experts"] // ep
            shards.append(DimShard(expert_rank * each, each, each))
        else:
            whole = prod(size[dim] for dim in dims)
            shards.append(DimShard(0, whole, whole))
    copy, copies = next(((shard.copy, shard.copies) for shard in shards if shard.copies > 1), (0, 1) if split else (rank, degree))
    return WeightShard(
        name=parameter.name,
        shape=parameter.shape(size),
        offset=tuple(shard.offset for shard in shards),
        length=tuple(shard.length for shard in shards),
        size=tuple(shard.size for shard in shards),
        copy=copy,
        copies=copies,
        shared=split and copies > 1,
        expert=ep > 1 and ("experts",) in parameter.dims,
        hidden_matrix=parameter.hidden_matrix,
    )
