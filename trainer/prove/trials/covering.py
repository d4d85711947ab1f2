"""Pairwise covering: few rows out of many in which every pair of choices still occurs, so that factors are seen to interact in few runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heapify, heapreplace
from itertools import combinations
from typing import TypeVar

Row = TypeVar("Row", bound=tuple[Hashable, ...])
Pair = tuple[int, Hashable, int, Hashable]  # a factor and its choice, another factor and its choice


def choice_pairs(row: tuple[Hashable, ...]) -> set[Pair]:
    """Every pair of choices in a row, each with its factor."""
    return {(a, row[a], b, row[b]) for a, b in combinations(range(len(row)), 2)}


def covering_rows(rows: Iterable[Row], taken: Iterable[Row] = (), pairs_of: Callable[[Row], set[Pair]] = choice_pairs) -> Iterator[Row]:
    """Yield rows until every pair that occurs in `rows` occurs in a yielded or a taken row, each time the row with most new pairs.

    Among equals the earliest of `rows` comes first, so the order of `rows` states the preference. `pairs_of` says which pairs a
    row has.
    """
    pairs = {row: pairs_of(row) for row in rows}
    missing = set().union(*pairs.values()) - set().union(*map(pairs_of, taken))
    # A row has no more new pairs than when they were last counted: only rows that come first are counted again.
    most = [(-len(found & missing), place, row) for place, (row, found) in enumerate(pairs.items())]
    heapify(most)
    while missing:
        counted, place, row = most[0]
        new = pairs[row] & missing
        if len(new) == -counted:
            missing -= new
            yield row
        heapreplace(most, (-len(pairs[row] & missing), place, row))
