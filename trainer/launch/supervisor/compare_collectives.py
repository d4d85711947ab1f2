"""Compares what the ranks of a run that hangs have recorded of their collectives: who is behind, or calls another one than the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...spec.numbers.as_text import size_text
from ..rank.group_record import GroupRecord, Recorded, ranks_text

# Verbs whose payload is of the same size on all ranks of a group.
SAME_SIZES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")

Records = Mapping[int, Sequence[GroupRecord]]  # of each rank that was asked; empty where it has reported none


class Finding(NamedTuple):
    """What is to be said in a line. `behind` is the rank for which all the others wait, one for the next; None where it is not certain."""

    says: str
    behind: int | None = None


class _Group(NamedTuple):
    """A group of ranks, and the records of those that have reported."""

    label: str
    ranks: tuple[int, ...]
    records: dict[int, GroupRecord]

    def __str__(self) -> str:
        return f"{self.label} group of {ranks_text(self.ranks)}".lstrip()


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
        return f"{self.group}: {_has_not_finished(self.waiting)} {_text(self.collective)}, which {not_begun}"


def compare_collectives(records: Records) -> Finding | None:
    """Return what the records say of a hang; None if they say nothing."""
    groups = _groups(records)
    for group in groups:
        if says := _mismatch(group):
            return Finding(f"{group}: {says}")
    gaps = [gap for group in groups if (gap := _gap(group))]
    if gaps:
        behind = _behind_all(records, gaps)
        shown = next((gap for gap in gaps if behind in gap.behind), _innermost(gaps))
        return Finding(str(shown), behind)
    return next((Finding(says) for group in groups if (says := _unfinished(group))), None)


def _groups(records: Records) -> list[_Group]:
    """The groups of several ranks, the smallest first."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, GroupRecord]] = defaultdict(dict)
    for rank in sorted(records):
        for each in records[rank]:
            found[each.name, each.ranks][rank] = each
    groups = [_Group(next(iter(by_rank.values())).label, ranks, by_rank) for (_, ranks), by_rank in found.items() if len(ranks) > 1]
    return sorted(groups, key=lambda group: (len(group.ranks), group.ranks))


def _mismatch(group: _Group) -> str:
    """Say that two ranks have begun different collectives where one has not finished its own; "" if none have."""
    for rank, record in group.records.items():
        own = record.unfinished
        for other, its in group.records.items():
            theirs = its.collective(own.number) if own else None
            if own and theirs and _compared(own) != _compared(theirs):
                return f"collective {own.number} is {_call(own)} on rank {rank}, {_call(theirs)} on rank {other}"
    return ""


def _compared(collective: Recorded) -> tuple[str, int]:
    return collective.verb, collective.payload if collective.verb in SAME_SIZES else 0


def _gap(group: _Group) -> _Gap | None:
    """The newest collective for which ranks of the group wait, where others have not begun it."""
    first = {rank: own for rank, record in group.records.items() if (own := record.unfinished)}
    if not first:
        return None
    collective = max(first.values(), key=lambda each: each.number)
    behind = tuple(rank for rank, record in group.records.items() if record.begun is not None and record.begun < collective.number)
    waiting = tuple(rank for rank, own in first.items() if own.number == collective.number)
    return _Gap(group, collective, waiting, behind) if behind else None


def _behind_all(records: Records, gaps: Sequence[_Gap]) -> int | None:
    """The rank for which all others wait, directly or through others, and which itself waits in no message; None if that is not certain."""
    members = {rank for own in records.values() for each in own for rank in each.ranks}
    if not all(records.values()) or not members <= records.keys():
        return None
    free = [rank for rank, own in records.items() if not any(each.unfinished or each.may_wait for each in own)]
    if len(free) != 1:
        return None
    for_whom: dict[int, set[int]] = defaultdict(set)  # rank -> those that wait for it
    for gap in gaps:
        for rank in gap.behind:
            for_whom[rank] |= set(_waiting_for(gap.group, rank))
    held, ahead = {free[0]}, [free[0]]
    while ahead:
        more = for_whom[ahead.pop()] - held
        held |= more
        ahead += more
    return free[0] if held == set(records) else None


def _waiting_for(group: _Group, rank: int) -> Iterator[int]:
    """The ranks of a group whose first unfinished collective this rank has not begun."""
    for other, record in group.records.items():
        begun = group.records[rank].begun
        if (own := record.unfinished) and begun is not None and begun < own.number:
            yield other


def _innermost(gaps: Sequence[_Gap]) -> _Gap:
    """A gap whose ranks behind wait in no other, if there is one: those of the others may be behind because of it."""
    waiting = {rank for gap in gaps for rank in gap.waiting}
    return next((gap for gap in gaps if not waiting & set(gap.behind)), gaps[0])


def _unfinished(group: _Group) -> str:
    """Say that no rank of a group is known to be behind in the collective that none has finished; "" if all have finished theirs."""
    first = {rank: own for rank, record in group.records.items() if (own := record.unfinished)}
    if not first:
        return ""
    collective = max(first.values(), key=lambda each: each.number)
    waiting = [rank for rank, own in first.items() if own.number == collective.number]
    silent = [rank for rank in group.ranks if rank not in group.records]
    known = all(record.begun is not None for record in group.records.values())
    begun = f"{ranks_text(silent)} gave no record" if silent else "which all have begun" if known else "which no rank is known to lack"
    return f"{group}: {_has_not_finished(waiting)} {_text(collective)}, {begun}"


def _has_not_finished(ranks: Sequence[int]) -> str:
    return f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} not finished"


def _text(collective: Recorded) -> str:
    """A collective with its number and its size: `all_reduce 1212 of 4.00 MiB`."""
    return f"{collective.verb} {collective.number}{_of(collective)}"


def _call(collective: Recorded) -> str:
    return f"{collective.verb}{_of(collective)}"


def _of(collective: Recorded) -> str:
    return f" of {size_text(collective.payload)}" if collective.payload else ""
