"""Few rows out of many in which every two choices still meet: what one factor does to another shows, at a fraction of the runs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from itertools import combinations
from typing import TypeVar

Row = TypeVar("Row", bound=tuple[Hashable, ...])
Pair = tuple[int, Hashable, int, Hashable]  # a factor and its choice, another and its choice


def pairs(row: tuple[Hashable, ...]) -> set[Pair]:
    """Every two choices of a row, by their factors."""
    return {(a, row[a], b, row[b]) for a, b in combinations(range(len(row)), 2)}


def covering(rows: Iterable[Row], taken: Iterable[Row] = ()) -> Iterator[Row]:
    """Rows in which all pairs meet that meet in any row and in none that is taken already: each time the one with most new pairs.

    Of rows with as many the first comes first, so that the order of `rows` says which are liked best.
    """
    of = {row: pairs(row) for row in rows}
    left = set().union(*of.values()) - set().union(*map(pairs, taken))
    while left:
        row = max(of, key=lambda row: len(of[row] & left))
        left -= of[row]
        yield row
