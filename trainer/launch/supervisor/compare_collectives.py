"""Compares what the ranks of a run that hangs have recorded of their collectives: who is behind, or calls another one than the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...spec.numbers.as_text import size_text
from ..rank.group_record import GroupRecord, Recorded, ranks_text

# Verbs whose payload is of the same size on all ranks of a group.
SAME_SIZES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
MOST_NUMBERS = 8  # of unfinished collectives of a group, that are compared

Records = Mapping[int, Sequence[GroupRecord]]  # of each rank that was asked; empty where it has reported none


class HangFinding(NamedTuple):
    """What is to be said in a line. `behind` is the rank for which all the others wait, one for the next; None where it is not certain."""

    says: str
    behind: int | None = None


class _Group(NamedTuple):
    """A group of ranks, the records of those that have reported, and the first collective that each of these has begun and not finished."""

    label: str
    ranks: tuple[int, ...]
    records: dict[int, GroupRecord]
    unfinished: dict[int, Recorded]

    def __str__(self) -> str:
        return f"{self.label} group of {ranks_text(self.ranks)}".lstrip()

    def waiting_for(self, rank: int) -> set[int]:
        """The ranks whose first unfinished collective this rank has not begun."""
        begun = self.records[rank].begun
        return set() if begun is None else {other for other, own in self.unfinished.items() if begun < own.number}


class _Gap(NamedTuple):
    """In a group the `waiting` ranks have begun a collective and not finished it; those `behind` have not begun it."""

    group: _Group
    collective: Recorded
    waiting: tuple[int, ...]
    behind: tuple[int, ...]

    def __str__(self) -> str:
        last = sorted({newest for rank in self.behind if (newest := self.group.records[rank].begun) is not None})
        begun = " to ".join(str(each) if each else "none" for each in (last[0], last[-1])[: len(last)])
        has, its = ("has", "its") if len(self.behind) == 1 else ("have", "their")
        not_begun = f"{ranks_text(self.behind)} {has} not begun ({its} last {'is' if len(last) == 1 else 'are'} {begun})"
        return f"{self.group}: {_has_not_finished(self.waiting)} {_text(self.collective)}, which {not_begun}{_silent_text(self.group)}"


def compare_collectives(records: Records) -> HangFinding | None:
    """Return what the records say of a hang; None if they say nothing."""
    groups = _groups(records)
    for group in groups:
        if says := _mismatch(group):
            return HangFinding(f"{group}: {says}")
    gaps = [gap for group in groups if (gap := _gap(group))]
    if gaps:
        behind = _behind_all(records, groups)
        shown = next((gap for gap in gaps if behind in gap.behind), _innermost(gaps))
        return HangFinding(str(shown), behind)
    return next((HangFinding(says) for group in groups if (says := _unfinished_text(group))), None)


def _groups(records: Records) -> list[_Group]:
    """The groups of several ranks, the smallest first."""
    found: dict[tuple[str, object], dict[int, GroupRecord]] = defaultdict(dict)
    for rank in sorted(records):
        for each in records[rank]:
            found[each.name, each.ranges][rank] = each
    groups = []
    for by_rank in found.values():
        unfinished = {rank: own for rank, record in by_rank.items() if (own := record.first_unfinished)}
        any_ = next(iter(by_rank.values()))
        groups.append(_Group(any_.label, any_.ranks, by_rank, unfinished))
    return sorted((group for group in groups if len(group.ranks) > 1), key=lambda group: (len(group.ranks), group.ranks))


def _mismatch(group: _Group) -> str:
    """Say that ranks have begun different collectives where one has not finished its own; "" if none have."""
    for number in sorted({own.number for own in group.unfinished.values()})[:MOST_NUMBERS]:
        ranks_of: dict[tuple[str, int], list[int]] = defaultdict(list)
        calls: dict[tuple[str, int], str] = {}
        for rank, record in group.records.items():
            if own := record.collective(number):
                ranks_of[_comparison_key(own)].append(rank)
                calls.setdefault(_comparison_key(own), _call(own))
        if len(calls) > 1:
            each = ", ".join(f"{text} on {ranks_text(ranks_of[call])}" for call, text in calls.items())
            return f"collective {number} is {each}{_silent_text(group)}"
    return ""


def _comparison_key(collective: Recorded) -> tuple[str, int]:
    return collective.verb, collective.payload if collective.verb in SAME_SIZES else 0


def _gap(group: _Group) -> _Gap | None:
    """The newest collective for which ranks of the group wait, where others have not begun it."""
    if not group.unfinished:
        return None
    collective = max(group.unfinished.values(), key=lambda each: each.number)
    behind = tuple(rank for rank, record in group.records.items() if record.begun is not None and record.begun < collective.number)
    return _Gap(group, collective, _waiting_in(group, collective), behind) if behind else None


def _waiting_in(group: _Group, collective: Recorded) -> tuple[int, ...]:
    return tuple(rank for rank, own in group.unfinished.items() if own.number == collective.number)


def _behind_all(records: Records, groups: Sequence[_Group]) -> int | None:
    """The rank for which all others wait, directly or through others, and which itself waits in no message; None if that is not certain."""
    if not {rank for group in groups for rank in group.ranks} <= records.keys():
        return None
    free = [rank for rank, own in records.items() if not any(each.first_unfinished or each.may_wait for each in own)]
    if len(free) != 1:
        return None
    groups_of: dict[int, list[_Group]] = defaultdict(list)
    for group in groups:
        for rank in group.records if group.unfinished else ():
            groups_of[rank].append(group)
    held, ahead = {free[0]}, [free[0]]
    while ahead and len(held) < len(records):
        rank = ahead.pop()
        more = {other for group in groups_of[rank] for other in group.waiting_for(rank)} - held
        held |= more
        ahead += more
    return free[0] if len(held) == len(records) else None


def _innermost(gaps: Sequence[_Gap]) -> _Gap:
    """A gap whose ranks behind wait in no other, if there is one: those of the others may be behind because of it."""
    waiting = {rank for gap in gaps for rank in gap.waiting}
    return next((gap for gap in gaps if not waiting & set(gap.behind)), gaps[0])


def _unfinished_text(group: _Group) -> str:
    """Say that no rank of a group is known to be behind in the collective that none has finished; "" if all have finished theirs."""
    if not group.unfinished:
        return ""
    collective = max(group.unfinished.values(), key=lambda each: each.number)
    known = all(record.begun is not None for record in group.records.values())
    begun = _silent_text(group) or (", which all have begun" if known else ", which no rank is known to lack")
    return f"{group}: {_has_not_finished(_waiting_in(group, collective))} {_text(collective)}{begun}"


def _silent_text(group: _Group) -> str:
    """Say which ranks of a group have reported nothing; "" if all have."""
    silent = [rank for rank in group.ranks if rank not in group.records]
    return f", {ranks_text(silent)} gave no record" if silent else ""


def _has_not_finished(ranks: Sequence[int]) -> str:
    return f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} not finished"


def _text(collective: Recorded) -> str:
    """A collective with its number and its size: `all_reduce 1212 of 4.00 MiB`."""
    return f"{collective.verb} {collective.number}{_of(collective)}"


def _call(collective: Recorded) -> str:
    return f"{collective.verb}{_of(collective)}"


def _of(collective: Recorded) -> str:
    return f" of {size_text(collective.payload)}" if collective.payload else ""
