"""What a rank reports of its collectives when the run hangs: for each group of ranks the newest and those that are not finished."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

SHOWN_RANGES = 6  # ranks, or ranges of them, that a sentence lists

RankRange = tuple[int, int, int]  # the first and the last of ranks at equal distances, and that distance


class Recorded(msgspec.Struct, frozen=True, array_like=True):
    """One collective of a rank: its number in the group, from 1; the verb; bytes of the payload; whether the rank has finished it."""

    number: int
    verb: str
    payload: int
    finished: bool


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The collectives of one rank in one group, which has that `name` on all its ranks; `label` is for people.

    `ranges` are the group's ranks. The rank has begun no collective after number `begun`; None where that is not known. `recent` holds a
    few that it has finished, the newest of them, and the first of those that it has begun and not finished. `may_wait`: the rank has a send
    or a receive under way in the group, or something that is not recorded.
    """

    name: str
    label: str
    ranges: tuple[RankRange, ...]
    begun: int | None
    recent: tuple[Recorded, ...] = ()
    may_wait: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the group."""
        return tuple(rank for first, last, step in self.ranges for rank in range(first, last + 1, step))

    @property
    def first_unfinished(self) -> Recorded | None:
        """The first collective that the rank has begun and not finished."""
        return next((each for each in self.recent if not each.finished), None)

    def collective(self, number: int) -> Recorded | None:
        """The collective with this number; None where it is not in the record."""
        return next((each for each in self.recent if each.number == number), None)


def group_records(content: Any) -> tuple[GroupRecord, ...]:
    """Return the records in a rank's message; none if it holds something else."""
    try:
        return msgspec.convert(content, tuple[GroupRecord, ...])
    except msgspec.ValidationError:
        return ()


def ranges_of(ranks: Iterable[int]) -> tuple[RankRange, ...]:
    """Return ranks as few ranges: 0, 1, 2, 6 -> (0, 2, 1), (6, 6, 1); 0, 8, 16 -> (0, 16, 8)."""
    ranges: list[RankRange] = []
    for rank in sorted(ranks):
        first, last, step = ranges[-1] if ranges else (rank, rank, 1)
        if ranges and (first == last or rank - last == step):
            ranges[-1] = (first, rank, rank - last)
        else:
            ranges.append((rank, rank, 1))
    return tuple(ranges)


def ranks_text(ranks: Sequence[int]) -> str:
    """Name ranks: `rank 3`, `ranks 0, 2`, `ranks 0 to 7`, `ranks 0 to 56 by 8`."""
    ranges = ranges_of(ranks)
    left_out = sum(len(range(first, last + 1, step)) for first, last, step in ranges[SHOWN_RANGES:])
    more = f" and {left_out} more" if left_out else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(_range_text, ranges[:SHOWN_RANGES]))}{more}"


def _range_text(ranks: RankRange) -> str:
    first, last, step = ranks
    if last - first <= step:
        return str(first) if first == last else f"{first}, {last}"
    return f"{first} to {last}{f' by {step}' if step > 1 else ''}"
