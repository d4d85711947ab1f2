"""Bytes that a rank sends in a collective, and its hops."""

from math import inf, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrain.trainer.plan.axes.collectives import ALGORITHMS, Wire, collective_cost, server_seconds


def sent_bytes(verb: str, payload: int, size: int, algorithm: str = "ring") -> int:
    """Bytes that a rank sends."""
    return collective_cost(verb, payload, Wire(size, size, 1.0, 0.0), algorithm)[0]


def hops(verb: str, size: int, algorithm: str) -> float:
    """Seconds of a message of no bytes, where a hop takes one."""
    return collective_cost(verb, 0, Wire(size, size, 1.0, 1.0), algorithm)[1]


@given(st.integers(2, 300), st.integers(0, 10**9))
def test_a_ring_sends_all_but_one_part_twice(size: int, part: int) -> None:
    """2(n - 1)/n S in 2(n - 1) hops (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002); half of it for each half."""
    payload = part * size
    assert sent_bytes("all_reduce", payload, size) == 2 * (size - 1) * part
    assert (
        sent_bytes("all_gather", payload, size)
        == sent_bytes("reduce_scatter", payload, size)
        == sent_bytes("all_to_all", payload, size)
        == (size - 1) * part
    )
    assert hops("all_reduce", size, "ring") == 2 * hops("all_gather", size, "ring") == 2 * (size - 1)


@given(st.integers(1, 9), st.integers(0, 10**9))
def test_recursive_halving_sends_the_rings_bytes_in_fewer_hops(doublings: int, part: int) -> None:
    size = 2**doublings
    for verb in ("all_reduce", "all_gather", "reduce_scatter"):
        assert sent_bytes(verb, part * size, size, "halving") == sent_bytes(verb, part * size, size, "ring")
    assert hops("all_reduce", size, "halving") == 2 * log2(size)
    assert hops("reduce_scatter", size, "halving") == log2(size)


def test_recursive_halving_beyond_a_power_of_two_sends_whole_tensors_first_and_last() -> None:
    """Thakur et al. 2005, doi:10.1177/1094342005051521: ranks 4 and 5 first add their tensors to a partner's."""
    assert sent_bytes("all_reduce", 1200, 6, "halving") == 2 * 1200 * 3 // 4 + 1200
    assert hops("all_reduce", 6, "halving") == 2 * log2(4) + 2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("verb", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"])
def test_a_group_of_one_sends_nothing(algorithm: str, verb: str) -> None:
    assert collective_cost(verb, 1000, Wire(1, 1, inf, 1.0), algorithm) == (0, 0.0)


def test_a_parameter_server_receives_resnet_50s_gradients_at_73_gigabytes_a_second() -> None:
    """97.5 MB from each of 256 others 3 times a second, a GB being 1024 MB."""
    assert server_seconds(97.5, 1, Wire(257, 1, 73.1 * 1024, 0.0)) == pytest.approx(1 / 3, rel=1e-3)


def test_a_parameter_servers_one_link_carries_every_other_ranks_tensor() -> None:
    assert server_seconds(1000, 1, Wire(16, 16, 50.0, 0.0)) == 15 * 1000 / 50


def test_gloo_takes_as_long_for_a_reduce_scatter_as_for_an_all_reduce() -> None:
    """Its copies come on top; it sends as many bytes as are counted."""
    wires = [Wire(2, 2, 1e9, 0.0, by_gloo=each) for each in (False, True)]
    costs = [[collective_cost(verb, 10**6, wire) for verb in ("all_reduce", "all_gather", "reduce_scatter")] for wire in wires]
    assert [sent for sent, _ in costs[1]] == [sent for sent, _ in costs[0]] == [10**6, 500_000, 500_000]
    assert [seconds for _, seconds in costs[0]] == pytest.approx([1e-3, 5e-4, 5e-4])
    assert [seconds for _, seconds in costs[1]] == pytest.approx([1e-3, 6.5e-4, 1.65e-3])
