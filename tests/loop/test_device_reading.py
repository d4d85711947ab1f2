"""The judgement of what all devices gave: which is slow, which is wrong, and when neither can be told; which copy has departed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from distrain.trainer.loop.devices.device_reading import DeviceReading, differing_devices, slow_devices, step_share, wrong_devices
from distrain.trainer.loop.devices.weight_copies import Departure, all_agree, first_departure, totals


def readings(bits: Sequence[int | None] = (), seconds: Sequence[float] = (), kinds: str = "") -> list[DeviceReading]:
    """Readings of as many devices as there are figures; the kind of each is a letter."""
    count = max(len(bits), len(seconds))
    rows = zip(bits or [7] * count, seconds or [1.0] * count, kinds or "a" * count, strict=True)
    return [
        DeviceReading(rank=rank, host="h", device="cpu", kind=kind, seconds=time, bits=each) for rank, (each, time, kind) in enumerate(rows)
    ]


# fmt: off
BITS: tuple[tuple[Sequence[int | None], str, list[int], list[tuple[int, int]]], ...] = (  # bits, kinds, wrong ranks, ranks that differ
    ((5, 5, 5),          "aaa",    [],  []),
    ((5, 6, 5),          "aaa",    [1], []),
    ((6, 5, 5, 5),       "aaaa",   [0], []),
    ((5, 6),             "aa",     [],  [(0, 1)]),
    ((5, 5, 6, 6),       "aaaa",   [],  [(0, 2)]),     # half is no majority
    ((5, 6, 4),          "aaa",    [],  [(0, 1)]),
    ((5, 5, 4, 6, 5),    "aaaaa",  [2, 3], []),
    ((5, 5, 5, 6),       "aaab",   [],  []),           # another kind may have other bits
    ((5, 5, 5, 6, 7, 6), "aaabbb", [4], []),
    ((5, None, 5, 6),    "aaaa",   [3], []),           # one had no room
    ((5, None, 6),       "aaa",    [],  [(0, 2)]),
    ((0, 0, 1),          "aaa",    [2], []),
    ((None, None),       "aa",     [],  []),
)
# fmt: on


@pytest.mark.parametrize(("bits", "kinds", "wrong", "differ"), BITS)
def test_a_device_is_wrong_where_most_of_its_kind_have_other_bits(
    bits: Sequence[int | None], kinds: str, wrong: list[int], differ: list[tuple[int, int]]
) -> None:
    found = readings(bits, kinds=kinds)
    assert sorted(wrong_devices(found)) == wrong
    assert [(one.rank, other.rank) for one, other in differing_devices(found)] == differ


def test_a_device_that_does_not_repeat_itself_is_wrong_without_any_other() -> None:
    (alone,) = readings([5])
    assert wrong_devices([alone]) == {}
    assert wrong_devices([replace(alone, repeats=False)]) == {0: "it gives other bits than before for the same work"}
    three = readings([5, 6, 5])
    assert "than before" in wrong_devices([three[0], replace(three[1], repeats=False), three[2]])[1]


# fmt: off
SECONDS: tuple[tuple[Sequence[float], str, str, dict[int, float]], ...] = (  # seconds, kinds, torch's type of device, slow ranks
    ((1.0, 1.0, 1.24, 1.0),      "aaaa",  "cuda", {}),
    ((1.0, 1.0, 1.5, 1.0),       "aaaa",  "cuda", {2: 1.5}),
    ((1.0, 1.0, 2.9, 1.0),       "aaaa",  "cpu",  {}),
    ((1.0, 1.0, 4.0, 1.0),       "aaaa",  "cpu",  {2: 4.0}),
    ((1.0, 20.0),                "aa",    "cpu",  {1: 20.0}),   # of two the quicker is the median
    ((1.0, 1.0, 1.0, 2.0),       "aaab",  "cuda", {}),
    ((1.0, 2.0, 2.0, 2.0, 8.0),  "aaaaa", "cuda", {4: 4.0}),
    ((5.0,),                     "a",     "cuda", {}),
)
# fmt: on


@pytest.mark.parametrize(("seconds", "kinds", "device", "slow"), SECONDS)
def test_a_device_is_slow_by_the_median_of_its_kind(seconds: Sequence[float], kinds: str, device: str, slow: dict[int, float]) -> None:
    assert slow_devices(readings(seconds=seconds, kinds=kinds), device) == slow


def test_a_slow_device_costs_more_of_a_step_that_computes_more() -> None:
    assert step_share(2.0, 1.0) == 0.5
    assert step_share(1.5, 0.5) == pytest.approx(0.2)
    assert step_share(3.0, 0.0) == 0.0


Rows = dict[tuple[int, ...], list[tuple[str, int]]]


def copies(*rows: Sequence[int]) -> list[Rows]:
    """The rows of a group of ranks, which hold copies of the weights a, b, ..."""
    return [{tuple(range(len(rows))): list(zip("abc", each, strict=False))} for each in rows]


# fmt: off
COPIES = (
    (copies((1, 2, 3), (1, 2, 3)),            None),
    (copies((1, 2, 3), (1, 5, 6)),            Departure(name="b", rank=1, other=0, is_known=False)),
    (copies((1, 2), (1, 2), (1, 3)),          Departure(name="b", rank=2, other=0, is_known=True)),
    (copies((4, 2), (1, 2), (1, 2)),          Departure(name="a", rank=0, other=1, is_known=True)),
    (copies((1, 2), (1, 3), (1, 4)),          Departure(name="b", rank=1, other=0, is_known=False)),
    (copies((1,), (1,), (2,), (2,)),          Departure(name="a", rank=2, other=0, is_known=False)),
)
# fmt: on


@pytest.mark.parametrize(("everyone", "departure"), COPIES)
def test_the_first_weight_whose_copies_differ_is_found(everyone: list[Rows], departure: Departure | None) -> None:
    assert first_departure(everyone) == departure
    assert all_agree([totals(rows) for rows in everyone]) is (departure is None)


def test_copies_are_compared_within_their_group_alone() -> None:
    one: Rows = {(0, 2): [("a", 1)]}
    other: Rows = {(1, 3): [("a", 2)]}
    assert all_agree([totals(rows) for rows in (one, other, one, other)])
    assert first_departure([one, other, one, other]) is None
    spoiled: Rows = {(1, 3): [("a", 3)]}
    assert not all_agree([totals(rows) for rows in (one, other, one, spoiled)])
    assert first_departure([one, other, one, spoiled]) == Departure(name="a", rank=3, other=1, is_known=False)
