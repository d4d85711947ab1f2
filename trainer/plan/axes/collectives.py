"""Costs of collectives, by algorithm: the bytes that a rank sends, the hops in a row, the seconds.

The payload S is the bytes of the whole tensor: the one that an all-reduce sums, an all-gather produces, a reduce-scatter takes, that
one rank gives to an all-to-all, that a send moves. n is the group's size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wire:
    """The links of a group of ranks.

    A ring over nodes crosses them on every rail that its members own: g members in a node carry g times one member's link between
    nodes, up to the link inside a node.
    """

    size: int  # ranks
    in_node: int  # ranks in one node
    rate: float  # bytes/s that one rank sends
    hop: float  # seconds of one hop, the mean over a ring
    by_gloo: bool = False  # torch's messages between CPUs
    known: bool = True  # False: the cluster doesn't state the link; bytes are counted, seconds are not

    @property
    def link(self) -> str:
        """`inside` a node or `between` nodes."""
        return "inside" if self.size <= self.in_node else "between"


def all_but_one_share(payload: int, size: int) -> int:
    """(n - 1)/n of the payload's bytes, rounded up."""
    return -(-payload * (size - 1) // size)


def _ring_all_reduce(payload: int, size: int) -> tuple[int, int]:
    """Reduce-scatter, then all-gather: 2(n - 1)/n S in 2(n - 1) hops."""
    return 2 * all_but_one_share(payload, size), 2 * (size - 1)


def _ring_half(payload: int, size: int) -> tuple[int, int]:
    return all_but_one_share(payload, size), size - 1


def _send(payload: int, size: int) -> tuple[int, int]:
    return payload, 1


def _halving_all_reduce(payload: int, size: int) -> tuple[int, int]:
    """Recursive halving and doubling (Thakur et al. 2005, doi:10.1177/1094342005051521): the ring's bytes in
    2 log2(n) hops; ranks beyond a power of two send their data first and get the sum back: S more, 2 hops more."""
    even = 1 << (size.bit_length() - 1)
    extra = size != even
    return 2 * all_but_one_share(payload, even) + extra * payload, 2 * (even.bit_length() - 1) + 2 * extra


def _halving_half(payload: int, size: int) -> tuple[int, int]:
    return all_but_one_share(payload, size), (size - 1).bit_length()


def _tree_all_reduce(payload: int, size: int) -> tuple[int, int]:
    """Two binary trees, each for half of the bytes (Sanders, Speck and Traeff 2009, doi:10.1016/j.parco.2009.09.001; NCCL's `Tree`): a rank
    is a leaf of one, where it sends S/2, and inside the other, where it sends S/2 up and S/2 to each of two children, in 2 log2(n) hops."""
    return 2 * payload, 2 * (size - 1).bit_length()


Cost = Callable[[int, int], tuple[int, int]]

RING: dict[str, Cost] = {
    "all_reduce":     _ring_all_reduce,
    "reduce_scatter": _ring_half,
    "all_gather":     _ring_half,
    "all_to_all":     _ring_half,
    "send":           _send,
}  # fmt: skip

ALGORITHMS: dict[str, dict[str, Cost]] = {
    "ring":    RING,
    "halving": RING | {"all_reduce": _halving_all_reduce, "reduce_scatter": _halving_half, "all_gather": _halving_half},
    "tree":    RING | {"all_reduce": _tree_all_reduce},
}  # fmt: skip
# How many times as long as a ring gloo's messages take, at the rate of its all-reduce: torch copies through a tensor of all parts and
# back, and its reduce-scatter is an all-reduce. Of 13 MB between two processes they took 0.64 and 1.7 times as long as an all-reduce
# (two cores of an AMD EPYC).
GLOO_SLOWER = {"all_gather": 1.3, "reduce_scatter": 3.3}
FASTEST = "auto"  # of a library that has rings and trees, such as NCCL: the faster one for each message


def collective_cost(verb: str, payload: int, wire: Wire, algorithm: str = "ring") -> tuple[int, float]:
    """(bytes that a rank sends, seconds) of one collective of `payload` bytes."""
    if isinstance(wire.size, int) and wire.size <= 1:  # of an array of sizes, the ring's formulas give 0 for one rank
        return 0, 0.0
    if algorithm == FASTEST:
        return min((collective_cost(verb, payload, wire, each) for each in ("ring", "tree")), key=lambda cost: cost[1])
    sent, hops = ALGORITHMS[algorithm][verb](payload, wire.size)
    slower = GLOO_SLOWER.get(verb, 1.0) if wire.by_gloo else 1.0
    return sent, slower * sent / wire.rate + hops * wire.hop


def server_seconds(payload: float, servers: int, wire: Wire) -> float:
    """Seconds in which each of the wire's ranks gives every parameter server, which is one of them, its part of `payload` bytes, or gets
    it: a server's link carries the parts of all others, another rank's those of all servers."""
    return payload / servers * max(wire.size - 1, servers) / wire.rate + wire.hop
