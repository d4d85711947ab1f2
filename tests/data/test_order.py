"""The order of samples: permutations that are computed, and shares that are kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrain.trainer.loop.data.samples.order import blend, permuted_index, random_key

SIZES = st.one_of(st.integers(1, 40), st.integers(1, 5000))
WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=9)


@given(SIZES, st.integers(0, 2**63), st.integers(0, 9))
def test_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    places = permuted_index(np.arange(size), size, random_key(seed, epoch))
    assert np.array_equal(np.sort(places), np.arange(size))


@given(st.integers(1, 2**50), st.lists(st.integers(0, 2**50), min_size=1, max_size=50, unique=True), st.integers(0, 2**63))
def test_a_huge_permutation_is_computed_place_by_place(size: int, numbers: list[int], seed: int) -> None:
    index = np.unique(np.array(numbers) % size)
    places = permuted_index(index, size, random_key(seed))
    assert len(np.unique(places)) == len(index)
    assert places.min() >= 0
    assert places.max() < size
    assert [int(permuted_index(index[at : at + 1], size, random_key(seed))[0]) for at in range(len(index))] == places.tolist()


def test_another_seed_or_epoch_is_another_order() -> None:
    orders = [tuple(permuted_index(np.arange(500), 500, random_key(seed, epoch))) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16


@pytest.mark.parametrize("size", [3, 7, 10, 33])
def test_every_position_is_equally_likely(size: int) -> None:
    """Over 4000 keys; five standard deviations of a count."""
    keys = np.repeat(random_key(0, np.arange(4000)), size)
    places = permuted_index(np.tile(np.arange(size), 4000), size, keys).reshape(4000, size)
    for column in places.T:
        counts = np.bincount(column, minlength=size)
        assert abs(counts - 4000 / size).max() < 5 * (4000 / size) ** 0.5


@given(WEIGHTS, st.integers(0, 2**38), st.integers(1, 300))
def test_a_sample_is_the_next_one_of_its_source(weights: list[float], first: int, count: int) -> None:
    source, nth = blend(np.arange(first, first + count), weights)
    for index in range(len(weights)):
        mine = nth[source == index]
        assert np.array_equal(mine, np.arange(len(mine)) + (mine[0] if len(mine) else 0))


@given(WEIGHTS, st.integers(1, 2000))
def test_every_source_keeps_its_share_at_every_sample(weights: list[float], count: int) -> None:
    """Each of the at most four halvings is off by less than one sample, and the next ones take a share of that."""
    source, nth = blend(np.arange(count), weights)
    for index, weight in enumerate(weights):
        mine = source == index
        assert nth[mine].tolist() == list(range(mine.sum()))
        off = np.cumsum(mine) - np.arange(1, count + 1) * weight / sum(weights)
        assert abs(off).max() < 4.01


def test_the_smallest_share_is_one_sample_in_two_to_the_24_and_exact_for_two_to_the_39() -> None:
    samples = np.array([2**23 - 1, 2**24 - 2, 2**24 - 1, 2**39 - 1])
    source, nth = blend(samples, (1.0, 2.0**24 - 1))
    assert source.tolist() == [1, 1, 0, 0]
    assert nth.tolist() == [2**23 - 1, 2**24 - 2, 0, 2**15 - 1]
