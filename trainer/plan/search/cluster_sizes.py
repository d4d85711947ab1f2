"""The best layout on clusters of several sizes: days and cost against GPUs, and the size beyond which GPUs are wasted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from ...spec.run import Run
from .search_result import Answer, FoundLayout, find_layouts

KNEE = 0.8  # of the highest tokens/s of a GPU


class SizedAnswer(NamedTuple):
    """The answer on so many nodes, and the run there."""

    nodes: int
    run: Run
    answer: Answer


def search_sizes(run: Run, fixed: frozenset[str], counts: Sequence[int]) -> Iterator[SizedAnswer]:
    """Yield the best layout on each number of nodes; the data degree is free, unless it is fixed."""
    for nodes in counts:
        yield _search_size(run, fixed, nodes)


def search_within(run: Run, fixed: frozenset[str], counts: Sequence[int], days: float) -> Iterator[SizedAnswer]:
    """Yield the best layout on numbers of nodes (ascending) up to the first on which the whole run takes at most `days`; then on sizes
    between it and the one before, an eighth of the gap apart, and so on until no size is between. The answer is the fewest of them that
    take at most `days`; where more nodes take longer, as of a batch with few divisors, fewer may do that were not tried."""
    before = 0
    for nodes in counts:
        each = _search_size(run, fixed, nodes)
        yield each
        if is_within(each, days):
            yield from _search_between(run, fixed, before, nodes, days) if before else ()
            return
        before = nodes


def _search_between(run: Run, fixed: frozenset[str], fewer: int, enough: int, days: float) -> Iterator[SizedAnswer]:
    """Yield sizes between one that takes more than `days` and one that does not, until they are neighbours."""
    while enough - fewer > 1:
        step = max(1, (enough - fewer) // 8)
        for between in range(fewer + step, enough, step):
            each = _search_size(run, fixed, between)
            yield each
            if is_within(each, days):
                enough = between
                break
            fewer = between


def is_within(sized: SizedAnswer, days: float) -> bool:
    """Whether the whole run takes at most `days` in the best layout."""
    best = best_layout(sized)
    return best is not None and best.days is not None and best.days <= days


def _search_size(run: Run, fixed: frozenset[str], nodes: int) -> SizedAnswer:
    dp = run.parallel.dp if "parallel.dp" in fixed else "auto"
    search = replace(run.search, rows=1)
    sized = replace(run, cluster=replace(run.cluster, nodes=nodes), parallel=replace(run.parallel, dp=dp), search=search)
    return SizedAnswer(nodes, sized, find_layouts(sized, fixed))


def tokens_per_gpu(sized: SizedAnswer) -> float:
    """Tokens/s of a GPU in the best layout; 0 where none fits or its time is not known."""
    best = best_layout(sized)
    rate = best.tokens_per_second if best else None
    return rate / (sized.nodes * sized.run.cluster.gpus) if rate else 0.0


def best_layout(sized: SizedAnswer) -> FoundLayout | None:
    """The best layout on a size."""
    return sized.answer.rows[0] if sized.answer.rows else None


def knee(sizes: Sequence[SizedAnswer]) -> int | None:
    """The most nodes on which a GPU still trains `KNEE` of the tokens that it trains at best; None where no time is known."""
    highest = max(map(tokens_per_gpu, sizes), default=0.0)
    return max((each.nodes for each in sizes if tokens_per_gpu(each) >= KNEE * highest), default=None) if highest else None


def best_size(sizes: Sequence[SizedAnswer], by: str) -> SizedAnswer | None:
    """The size whose best layout is best: least memory, cost or time; most tokens for the price. None where none fits, or where sizes are
    ranked by time and no time is known."""
    best = min(sizes, key=lambda each: _objective(each, by), default=None)
    return best if best is not None and _objective(best, by) < inf else None


def _objective(sized: SizedAnswer, by: str) -> float:
    """What the best size has least of; infinite where nothing fits, or where no time is known."""
    best = best_layout(sized)
    if best is None:
        return inf
    match by:
        case "memory":
            return best.memory
        case "cost" | "tokens_per_dollar":
            rate = tokens_per_gpu(sized)  # at any price of a GPU-hour the cheapest run is the one whose GPUs train the most tokens
            return 1 / rate if rate else inf
        case _:
            return best.days if best.days is not None else inf
