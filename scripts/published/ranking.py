"""How well predictions rank layouts: within groups of cases that differ only in their layout."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

from .measured import Score, step_seconds

LEAST = 3  # cases of a group
REPEAT = 1.03  # measured times that are closer than repeats of one run are


class Ranking(NamedTuple):
    """A group's name, its cases, how much slower the choice is than the best (0.1: 10 %), Kendall's tau, the largest tau of any plan, and
    of each clear pair, of two layouts whose times differ by more than repeats do, whether it is in order (1) or not (-1).

    A plan gives the same time to runs of one layout; such pairs count as 0 in tau.
    """

    name: str
    cases: int
    regret: float
    tau: float
    most: float
    clear: tuple[int, ...]


def rankings(scores: Iterable[Score]) -> list[Ranking]:
    """Rank every group of at least `LEAST` cases that are measured and planned."""
    groups: dict[str, list[Score]] = defaultdict(list)
    for each in scores:
        if each.step is not None:
            groups[_group(each)].append(each)
    return [_ranking(group) for group in groups.values() if len(group) >= LEAST]


def _group(each: Score) -> str:
    """The configuration of a case but for its layout: its degrees, its micro-batch, its schedule."""
    case = each.case
    model = {key: value for key, value in case["model"].items() if key not in ("arch_source", "arch_verified")}
    cluster = case["cluster"]
    kept = (case["source"]["name"], model, cluster["gpu"], cluster["gpus"], case["batch"]["global"], case["precision"], case["recompute"])
    return json.dumps((*kept, case["framework"]), sort_keys=True)


def _ranking(group: Sequence[Score]) -> Ranking:
    rows = [(each.prediction.step_seconds or 0.0, step_seconds(each.case) or 0.0, _layout(each)) for each in group]
    best = min(measured for _, measured, _ in rows)
    _, chosen, _ = min(rows)
    pairs = list(combinations(rows, 2))
    orders = [_sign(one[0] - other[0]) * _sign(one[1] - other[1]) for one, other in pairs]
    differ = [one[2] != other[2] for one, other in pairs]
    clear = [
        order
        for order, differs, (one, other) in zip(orders, differ, pairs, strict=True)
        if differs and max(one[1], other[1]) >= REPEAT * min(one[1], other[1])
    ]
    case = group[0].case
    name = f"{case['source']['name'][:30]} {case['model']['name']} {case['cluster']['gpus']} GPUs"
    return Ranking(name, len(group), chosen / best - 1, sum(orders) / len(pairs), sum(differ) / len(pairs), tuple(clear))


def _layout(each: Score) -> str:
    """The part of a case's configuration in which a group's cases differ."""
    return json.dumps([each.case[key] for key in ("parallel", "batch", "attention", "compile")], sort_keys=True)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
