"""Which rank orthogonalises which matrix under Muon, and what that computes (https://kellerjordan.github.io/posts/muon/, arXiv:2502.16982).

The matrices of a stage are dealt like cards: the largest first, one to each data-parallel rank in turn, and those of a data-parallel rank
one to each of its tensor-parallel ranks. So a matrix has one owner, whatever part of it a rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from .weight_slices import WeightShard


class DealtMatrix(NamedTuple):
    """A matrix of a weight of which this rank has a block, and its number among those of the weight: that of an expert, else 0."""

    shard: WeightShard
    expert: int


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """The FLOPs of the products of so many iterations: of X [m, n], m <= n, each computes X X^T, its square, and a product with X."""
    m, n = sorted((rows, columns))
    return steps * (4 * m * m * n + 2 * m**3)


def matrices_of(size: Sequence[int]) -> int:
    """The matrices of a weight of this size, whose last two dims are a matrix's."""
    return prod(size[:-2])


def matrix_order(shards: Sequence[WeightShard]) -> list[DealtMatrix]:
    """The matrices of a rank's weights, which are in the table's order, in the order in which they are dealt: those with most FLOPs first,
    of equals the same weight of each layer, then the next weight."""
    places: dict[str, int] = {}
    rows = []
    for shard in shards:
        if shard.hidden_matrix:
            place = places.setdefault(name_in_layer(shard.name), len(places))
            rows.append((-newton_schulz_flops(*shard.matrix, 1), place, shard))
    rows.sort(key=lambda row: row[:2])
    return [DealtMatrix(shard, expert) for *_, shard in rows for expert in range(matrices_of(shard.size))]


def owner(number: int, data: int, tensor: int) -> tuple[int, int]:
    """(the data-parallel rank of `data`, its tensor-parallel rank of `tensor`) that orthogonalises a matrix, from its number in
    `matrix_order`."""
    return number % data, number // data % tensor


def dealt(first: int, count: int, at: int, every: int) -> int:
    """How many of the numbers first, first + 1 ... of `count` matrices are `at` modulo `every`."""
    return (first + count - at + every - 1) // every - (first - at + every - 1) // every


def name_in_layer(name: str) -> str:
    """Return a weight's name inside its layer."""
    return name.split(".", 2)[2]
