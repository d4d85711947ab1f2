"""Consecutive rows in groups of limited size: the buckets of engine `native`, and the messages in which workers average their weights."""

import pytest

from distrain.trainer.plan.native.buckets import consecutive_groups


@pytest.mark.parametrize(
    ("sizes", "most", "groups"),
    [
        ([], 4, []),
        ([1, 3, 1], 4, [[1, 3], [1]]),
        ([2, 3, 1, 1], 4, [[2], [3, 1], [1]]),
        ([9, 1, 9], 4, [[9], [1], [9]]),  # one that is too large is alone
        ([0, 4, 0], 4, [[0, 4, 0]]),
    ],
)
def test_a_group_ends_before_the_row_that_would_exceed_its_size(sizes: list[int], most: int, groups: list[list[int]]) -> None:
    assert list(consecutive_groups(sizes, most, lambda size: size)) == groups
