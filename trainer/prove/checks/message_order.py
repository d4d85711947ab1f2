"""Whether the orders in which the ranks of a layout send the collectives of a step can deadlock."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ...spec.numbers.as_text import size_text

SHOWN = 4  # collectives that are put into words


class Collective(NamedTuple):
    """A collective that a rank took part in: the ranks of its group, the group's name, the verb, bytes of the payload."""

    ranks: tuple[int, ...]
    group: str
    verb: str
    payload: int

    def __str__(self) -> str:
        return f"{self.verb} of {size_text(self.payload)} over ranks {', '.join(map(str, self.ranks))}"


class Place(NamedTuple):
    """One collective of all ranks of a group: it is the group's `number`th, from 0."""

    ranks: tuple[int, ...]
    group: str
    number: int


def order_difference(folder: Path) -> str:
    """How the orders in RUN_DIR/message_order.json differ, in words; "" if they don't, or there is none."""
    try:
        text = (folder / "message_order.json").read_text()
    except OSError:
        return ""
    told: list[list[Any]] = json.loads(text)["ranks"]
    ranks = [[Collective(tuple(each[0]), *each[1:]) for each in order] for order in told]
    return _mismatch(ranks) or _cycle(ranks)


def _mismatch(ranks: Sequence[Sequence[Collective]]) -> str:
    """The first collective for which a rank of its group sends another one, or none.

    The sizes that ranks give to an all-to-all may differ.
    """
    sent: dict[Place, dict[int, Collective]] = defaultdict(dict)
    for rank, order in enumerate(ranks):
        for place, collective in _places(order):
            sent[place][rank] = collective
    for place, by_rank in sent.items():
        first = min(by_rank)
        for rank in place.ranks:
            other = by_rank.get(rank)
            if other is None:
                return f"rank {first} sends {by_rank[first]}, and rank {rank} does not"
            if _matched(other) != _matched(by_rank[first]):
                return f"rank {first} sends {by_rank[first]} where rank {rank} sends {other}"
    return ""


def _matched(collective: Collective) -> tuple[str, int]:
    return collective.verb, 0 if collective.verb == "all_to_all" else collective.payload


def _cycle(ranks: Sequence[Sequence[Collective]]) -> str:
    """Collectives of several groups that can deadlock, as one rank sends A before B and another B before A, or so on around a cycle.

    gloo runs asynchronous ones side by side, which hides it; NCCL's documentation forbids it.
    """
    after: dict[Place, set[Place]] = defaultdict(set)
    sent: dict[Place, Collective] = {}
    for order in ranks:
        places = dict(_places(order))
        sent |= places
        for place, later in pairwise(places):
            after[place].add(later)
    waiting = Counter(place for places in after.values() for place in places)
    free = [place for place in sent if not waiting[place]]
    while free:
        place = free.pop()
        del sent[place]
        for later in after[place]:
            waiting[later] -= 1
            if not waiting[later]:
                free.append(later)
    if not sent:
        return ""
    before_of = {later: place for place in sent for later in after[place] if later in sent}  # each of those left waits for another of them
    place, path = min(sent, key=lambda each: (each.number, each.ranks, each.group)), list[Place]()
    while place not in path:
        path.append(place)
        place = before_of[place]
    cycle = [str(sent[each]) for each in reversed(path[path.index(place) :])]
    more = f" and {len(cycle) - SHOWN} more" if len(cycle) > SHOWN else ""
    return f"collectives of several groups can deadlock, as ranks send them in different orders: {'; '.join(cycle[:SHOWN])}{more}"


def _places(order: Sequence[Collective]) -> Iterator[tuple[Place, Collective]]:
    """Yield a rank's collectives with their places."""
    counts: Counter[tuple[tuple[int, ...], str]] = Counter()
    for each in order:
        group = each.ranks, each.group
        yield Place(*group, counts[group]), each
        counts[group] += 1
