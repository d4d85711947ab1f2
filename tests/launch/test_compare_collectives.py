"""The ranks' records of their collectives say who is behind in a run that hangs; only a rank that holds up all others is named for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from distrain.tests.fakes.idle_rank import IdleRank, written_stack
from distrain.trainer.launch.rank.group_record import GroupRecord, Recorded, group_records, ranges_of, ranks_text
from distrain.trainer.launch.supervisor.compare_collectives import compare_collectives
from distrain.trainer.launch.supervisor.watchdog import hung_rank

MIB = 2**20


def record(label: str, ranks: Sequence[int], newest: int, *, waits: bool = False, call: str = "all_reduce 4", **more: Any) -> GroupRecord:
    """The record of a rank that has begun collective `newest` of a group, and `waits` in it; `call` is its verb and its MiB."""
    verb, size = call.split()
    recent = [Recorded(newest - 1, "all_reduce", 4 * MIB, True), Recorded(newest, verb, int(size) * MIB, not waits)]
    fields: dict[str, Any] = {"begun": newest, "recent": tuple(recent), **more}
    return GroupRecord(name=f"{label} {ranks}", label=label, ranges=ranges_of(ranks), **fields)


def data(newest: int, **more: Any) -> tuple[GroupRecord, ...]:
    """The record of a rank in one group of the ranks 0 to 2."""
    return (record("data", (0, 1, 2), newest, **more),)


WAITS = data(12, waits=True)
# Four ranks: tensor groups 0, 1 and 2, 3; data groups 0, 2 and 1, 3. Each waits for rank 3, the first through the others.
NESTED: dict[int, Sequence[GroupRecord]] = {
    0: (record("tensor", (0, 1), 40), record("data", (0, 2), 9, waits=True)),
    1: (record("tensor", (0, 1), 41, waits=True), record("data", (1, 3), 8)),
    2: (record("tensor", (2, 3), 33, waits=True), record("data", (0, 2), 8)),
    3: (record("tensor", (2, 3), 32), record("data", (1, 3), 8)),
}
NESTED_SAYS = "tensor group of ranks 2, 3: rank 2 has not finished all_reduce 33 of 4.00 MiB, which rank 3 has not begun (its last is 32)"
GROUP = "data group of ranks 0 to 2: "
BEHIND = f"{GROUP}ranks 0, 2 have not finished all_reduce 12 of 4.00 MiB, which rank 1 has not begun (its last is 11)"
SILENT = ", rank 2 gave no record"
# What each rank reports, what is said, the rank that is behind all others
CASES: dict[str, tuple[dict[int, Sequence[GroupRecord]], str, int | None]] = {
    "one is behind": ({0: WAITS, 1: data(11), 2: WAITS}, BEHIND, 1),
    "it may wait for something that is not recorded": ({0: WAITS, 1: data(11, may_wait=True), 2: WAITS}, BEHIND, None),
    "it waits in another group": (
        {0: WAITS, 1: (*data(11), record("", (1, 3), 5, waits=True)), 2: WAITS, 3: (record("", (1, 3), 5, waits=True),)},
        BEHIND,
        None,
    ),
    "one has begun none": (
        {0: WAITS, 1: data(0, recent=()), 2: WAITS},
        BEHIND.replace("its last is 11", "its last is none"),
        1,
    ),
    "two are behind": (
        {0: WAITS, 1: data(11), 2: data(10)},
        f"{GROUP}rank 0 has not finished all_reduce 12 of 4.00 MiB, which ranks 1, 2 have not begun (their last are 10 to 11)",
        None,
    ),
    "two wait, one for the other": (
        {0: WAITS, 1: data(11), 2: data(10, waits=True)},
        f"{GROUP}rank 0 has not finished all_reduce 12 of 4.00 MiB, which ranks 1, 2 have not begun (their last are 10 to 11)",
        None,
    ),
    "another waits in what it has begun": (
        {0: WAITS, 1: data(11), 2: data(11, waits=True)},
        f"{GROUP}rank 0 has not finished all_reduce 12 of 4.00 MiB, which ranks 1, 2 have not begun (their last is 11)",
        None,
    ),
    "a rank gave no record": ({0: WAITS, 1: data(11), 2: ()}, f"{BEHIND.replace('ranks 0, 2 have', 'rank 0 has')}{SILENT}", None),
    "a rank has ended": ({0: WAITS, 1: data(11)}, f"{BEHIND.replace('ranks 0, 2 have', 'rank 0 has')}{SILENT}", None),
    "the rank behind gave no record": (
        {0: WAITS, 1: (), 2: WAITS},
        f"{GROUP}ranks 0, 2 have not finished all_reduce 12 of 4.00 MiB, rank 1 gave no record",
        None,
    ),
    "it is not known what one has begun": (
        {0: WAITS, 1: data(0, begun=None, recent=()), 2: WAITS},
        f"{GROUP}ranks 0, 2 have not finished all_reduce 12 of 4.00 MiB, which no rank is known to lack",
        None,
    ),
    "all have begun": (
        {0: WAITS, 1: WAITS, 2: WAITS},
        f"{GROUP}ranks 0 to 2 have not finished all_reduce 12 of 4.00 MiB, which all have begun",
        None,
    ),
    "another verb": (
        {0: WAITS, 1: data(12, waits=True, call="all_gather 8"), 2: WAITS},
        f"{GROUP}collective 12 is all_reduce of 4.00 MiB on ranks 0, 2, all_gather of 8.00 MiB on rank 1",
        None,
    ),
    "another verb, which its rank has finished": (
        {0: WAITS, 1: data(12, call="broadcast 4"), 2: WAITS},
        f"{GROUP}collective 12 is all_reduce of 4.00 MiB on ranks 0, 2, broadcast of 4.00 MiB on rank 1",
        None,
    ),
    "another size": (
        {0: WAITS, 1: WAITS, 2: data(12, waits=True, call="all_reduce 5")},
        f"{GROUP}collective 12 is all_reduce of 4.00 MiB on ranks 0, 1, all_reduce of 5.00 MiB on rank 2",
        None,
    ),
    "sizes of an all-to-all": (
        {rank: data(12, waits=True, call=f"all_to_all {rank + 1}") for rank in range(3)},
        f"{GROUP}ranks 0 to 2 have not finished all_to_all 12 of 1.00 MiB, which all have begun",
        None,
    ),
    "groups that nest": (NESTED, NESTED_SAYS, 3),
    "groups that nest, and the last may wait": (
        NESTED | {3: (record("tensor", (2, 3), 32), record("data", (1, 3), 8, may_wait=True))},
        NESTED_SAYS,
        None,
    ),
    "two wait for each other": (
        {
            0: (record("data", (0, 1), 9, waits=True), record("expert copies", (0, 1), 5)),
            1: (record("data", (0, 1), 8), record("expert copies", (0, 1), 6, waits=True)),
        },
        "data group of ranks 0, 1: rank 0 has not finished all_reduce 9 of 4.00 MiB, which rank 1 has not begun (its last is 8)",
        None,
    ),
    "a barrier of the group without a label": (
        {0: (record("", (0, 1), 3, waits=True, call="barrier 0"),), 1: (record("", (0, 1), 2),)},
        "group of ranks 0, 1: rank 0 has not finished barrier 3, which rank 1 has not begun (its last is 2)",
        1,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_are_behind_or_call_another_collective_are_named(case: str) -> None:
    records, says, behind = CASES[case]
    found = compare_collectives(records)
    assert found is not None
    assert (found.says, found.behind) == (says, behind)


@pytest.mark.parametrize("records", [{}, {0: (), 1: ()}, dict.fromkeys(range(3), data(12)), {0: data(12), 1: data(11), 2: data(12)}])
def test_records_of_finished_collectives_say_nothing(records: dict[int, Sequence[GroupRecord]]) -> None:
    assert compare_collectives(records) is None


HANGS = (
    # location in the stack of each rank, the rank that is named, whether it stands out
    ("aaaa", 3, True),
    ("abab", 3, True),
    ("aaba", 2, True),  # by its stack: its collectives name another
)


@pytest.mark.parametrize(("stacks", "rank", "stands_out"), HANGS)
def test_collectives_name_a_rank_only_where_none_stands_out(stacks: str, rank: int, stands_out: bool) -> None:
    running = [IdleRank(each, step=7, stack=written_stack(where), collectives=tuple(NESTED[each])) for each, where in enumerate(stacks)]
    hang = hung_rank(running, 100.0)
    assert (hang.rank.rank, hang.stands_out) == (rank, stands_out)
    assert hang.why.startswith("no progress for 100 s; ")
    assert hang.why.endswith(f"; {NESTED_SAYS}")


def test_a_rank_that_is_not_certainly_behind_all_is_not_at_fault() -> None:
    """Two are behind: the line is added to what is said today, of the rank that is named today."""
    behind = compare_collectives(CASES["two are behind"][0])
    running = [IdleRank(each, step=7, collectives=tuple(own)) for each, own in CASES["two are behind"][0].items()]
    hang = hung_rank(running, 100.0)
    assert behind is not None
    assert (hang.rank.rank, hang.stands_out) == (0, False)
    assert hang.why == f"no progress for 100 s, and no other rank is further; none answers; {behind.says}"


@pytest.mark.parametrize("content", [None, 3, "text", [3], [{"name": "1"}], {"name": "1"}, [[]]])
def test_a_record_that_can_not_be_read_is_none(content: object) -> None:
    assert group_records(content) == ()


def test_a_record_is_read_as_it_was_sent() -> None:
    sent = (*NESTED[0], *data(0, begun=None, recent=()))
    assert group_records(json.loads(json.dumps(msgspec.to_builtins(sent)))) == sent
    assert [each.ranks for each in sent] == [(0, 1), (0, 2), (0, 1, 2)]


# fmt: off
NAMES: tuple[tuple[Sequence[int], str], ...] = (
    ((3,),                    "rank 3"),
    ((0, 1),                  "ranks 0, 1"),
    ((2, 0),                  "ranks 0, 2"),
    (range(8),                "ranks 0 to 7"),
    ((0, 1, 2, 5, 8, 9),      "ranks 0 to 2, 5, 8, 9"),
    ((0, 8),                  "ranks 0, 8"),
    (range(0, 64, 8),         "ranks 0 to 56 by 8"),
    ((*range(0, 48, 8), *range(100, 110)), "ranks 0 to 40 by 8, 100 to 109"),
    (tuple(each for each in range(32) if each % 4 < 2), "ranks 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21 and 4 more"),
)
# fmt: on


@pytest.mark.parametrize(("ranks", "text"), NAMES)
def test_ranks_are_named_by_their_ranges(ranks: Sequence[int], text: str) -> None:
    assert ranks_text(ranks) == text
    assert GroupRecord(name="", label="", ranges=ranges_of(ranks), begun=0).ranks == tuple(sorted(ranks))


def test_the_ranks_of_an_axis_are_few_numbers_at_any_scale() -> None:
    assert ranges_of(range(3, 16384, 8)) == ((3, 16379, 8),)
