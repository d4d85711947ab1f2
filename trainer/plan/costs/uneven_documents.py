"""How much longer attention inside documents takes on the slowest of several ranks than on average, by windows of drawn documents.

Ranks have other documents, and wait for the one whose attention takes longest. The windows are drawn with a fixed seed: of a text each
begins anywhere in a document; examples are packed as they come.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cache
from itertools import accumulate, pairwise
from math import sqrt
from typing import NamedTuple

from ...spec.derived.document_pairs import DocumentLengths, seen_pairs

WINDOWS, DOCUMENTS = 256, 20_000  # windows that are drawn, and about the most documents in all of them
FEWEST = 32  # windows in any case
SUMMED = 8  # sequences of a rank up to which their sums are drawn; the sum of more is taken to be normal

Window = tuple[int, ...]  # the place of each document's first token, and the end of the window


class SeenKeys(NamedTuple):
    """The keys that a kernel wastes for each query, and the tokens of an attention window with the share of the layers that have it."""

    wasted: float
    window: int = 0
    windowed: float = 0.0

    def load(self, window: Window) -> float:
        """Return what attention computes in a window of documents, in pairs of query and key, twice as many as are seen."""
        tokens = [end - begin for begin, end in pairwise(window)]
        whole = sum([each**2 for each in tokens])
        seen = sum([seen_pairs(each, min(each, self.window)) for each in tokens]) if self.windowed else 0
        return (1 - self.windowed) * whole + self.windowed * seen + self.wasted * window[-1]


@cache
def drawn_windows(lengths: DocumentLengths, seq: int) -> tuple[Window, ...]:
    """Return windows of `seq` tokens, the same at each call."""
    from random import Random

    draw, tokens, ends = Random(seq), lengths.tokens, list(accumulate(lengths.tokens))
    many = max(FEWEST, min(WINDOWS, int(DOCUMENTS * min(lengths.mean, seq) / seq)))
    windows, following = list[Window](), draw.choice(tokens)
    for _ in range(many):
        if not lengths.packed:
            token = draw.randrange(ends[-1])  # one is as likely in a document as that is long
            following = ends[bisect_right(ends, token)] - token
        places = [0]
        while places[-1] < seq and (not lengths.packed or places[-1] + min(following, seq) <= seq):
            places.append(min(places[-1] + following, seq))
            following = draw.choice(tokens)
        windows.append(tuple(places) if places[-1] == seq else (*places, seq))  # the rest is padding
    return tuple(windows)


@cache
def slowest_replica(lengths: DocumentLengths, seq: int, sequences: int, ranks: int, seen: SeenKeys) -> float:
    """Return the expected attention of the busiest of `ranks` replicas over that of the mean one, where each computes so many sequences
    before they wait for each other."""
    if ranks == 1:
        return 1.0
    loads = [seen.load(each) for each in drawn_windows(lengths, seq)]
    mean = sum(loads) / len(loads)
    if sequences <= SUMMED:
        return _expected_most(_drawn_sums(loads, sequences), ranks) / (sequences * mean)
    deviation = sqrt(sum((each - mean) ** 2 for each in loads) / len(loads) / sequences)
    return min(mean + deviation * _normal_most(ranks), max(loads)) / mean


@cache
def slowest_part(lengths: DocumentLengths | None, seq: int, parts: int, seen: SeenKeys) -> float:
    """Return the expected attention of the busiest of `parts` ranks that share each sequence over that of the mean one. Rank r has the
    queries of chunks r and 2 parts - 1 - r (context_parallel.py of the layers). Without lengths each sequence is one document."""
    if parts == 1:
        return 1.0
    most = whole = 0.0
    for window in drawn_windows(lengths, seq) if lengths else ((0, seq),):
        chunks = _chunk_pairs(window, seq, 2 * parts, seen)
        ranks = [chunks[rank] + chunks[-1 - rank] + seen.wasted * seq / parts for rank in range(parts)]
        most, whole = most + max(ranks), whole + sum(ranks)
    return most * parts / whole


def _chunk_pairs(window: Window, seq: int, chunks: int, seen: SeenKeys) -> list[float]:
    """Return twice the pairs of query and key of the queries in each chunk, less the queries, on average over layers."""

    def pairs(tokens: int) -> float:
        """Return those of the first tokens of a document."""
        return (1 - seen.windowed) * tokens**2 + seen.windowed * seen_pairs(tokens, min(tokens, seen.window))

    found = [0.0] * chunks
    for begin, end in pairwise(window):
        at = begin
        while at < end:
            chunk = at * chunks // seq
            stop = min(end, -(-(chunk + 1) * seq // chunks))
            found[chunk] += pairs(stop - begin) - pairs(at - begin)
            at = stop
    return found


def _drawn_sums(loads: list[float], many: int) -> list[float]:
    """Return sums of so many loads, drawn among them."""
    from random import Random

    draw = Random(many)
    return loads if many == 1 else [sum(draw.choices(loads, k=many)) for _ in range(2 * WINDOWS)]


def _expected_most(loads: list[float], ranks: int) -> float:
    """Return the expected largest of `ranks` values, each of which is one of the loads."""
    count, ordered = len(loads), sorted(loads)
    below: list[float] = [
        float(at / count) ** float(ranks) for at in range(count + 1)
    ]  # the probability that all are among so many of the least
    return sum([each * (upto - less) for each, less, upto in zip(ordered, below, below[1:], strict=False)])


def _normal_most(ranks: int) -> float:
    """Return the expected largest of `ranks` values of the standard normal distribution, by Blom's approximation."""
    from statistics import NormalDist

    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
