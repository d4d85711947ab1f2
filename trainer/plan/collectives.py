"""What one collective costs: bytes that a rank sends and hops in a row, by algorithm.

Payload S is the whole tensor's bytes: what an all-reduce adds up, what an all-gather ends with and a reduce-scatter
begins with, all that one rank hands to an all-to-all, what a send moves. n is the group's size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wire:
    """How a group is wired: ranks, ranks of it in one node, and the bytes/s and seconds a hop of its links.

    `rate` is what one rank of the group sends: a ring over nodes crosses them on every rail that its members own, so
    g members in a node carry g times one member's link between nodes, up to the link inside.
    """

    size: int
    in_node: int
    rate: float
    hop: float  # seconds of one hop, the mean over a ring's
    known: bool = True  # False: the cluster doesn't state the link, so bytes count and seconds don't

    @property
    def link(self) -> str:
        """`inside` a node or `between` nodes."""
        return "inside" if self.size <= self.in_node else "between"


def part(payload: int, size: int) -> int:
    """Bytes sent when all but one n-th of a payload travels: (n - 1)/n S, rounded up."""
    return -(-payload * (size - 1) // size)


def _ring_all_reduce(payload: int, size: int) -> tuple[int, int]:
    """Reduce-scatter, then all-gather: 2(n - 1)/n S in 2(n - 1) hops."""
    return 2 * part(payload, size), 2 * (size - 1)


def _ring_half(payload: int, size: int) -> tuple[int, int]:
    return part(payload, size), size - 1


def _send(payload: int, size: int) -> tuple[int, int]:
    return payload, 1


def _halving_all_reduce(payload: int, size: int) -> tuple[int, int]:
    """Recursive halving and doubling (Thakur et al. 2005, doi:10.1177/1094342005051521): the ring's bytes in
    2 log2(n) hops; ranks beyond a power of two hand their data in first and get the sum back: S more, 2 hops more."""
    even = 1 << (size.bit_length() - 1)
    extra = size != even
    return 2 * part(payload, even) + extra * payload, 2 * (even.bit_length() - 1) + 2 * extra


def _halving_half(payload: int, size: int) -> tuple[int, int]:
    return part(payload, size), (size - 1).bit_length()


def _server_all_reduce(payload: int, size: int) -> tuple[int, int]:
    """A parameter server: each worker sends S and receives S, in turn on the server's one link."""
    return payload, 2


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
    "server":  RING | {"all_reduce": _server_all_reduce},
}  # fmt: skip


def cost(verb: str, payload: int, wire: Wire, algorithm: str = "ring") -> tuple[int, float]:
    """(bytes that a rank sends, seconds) of one collective of `payload` bytes."""
    if wire.size <= 1:
        return 0, 0.0
    sent, hops = ALGORITHMS[algorithm][verb](payload, wire.size)
    if algorithm == "server" and verb == "all_reduce":
        return sent, 2 * wire.size * payload / wire.rate + hops * wire.hop
    return sent, sent / wire.rate + hops * wire.hop


def server_inflow(payload: float, workers: int, rate: float) -> float:
    """Bytes/s into a parameter server (and as many out): S bytes from each worker, `rate` times a second."""
    return payload * workers * rate
