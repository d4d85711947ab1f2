"""The time of an all-reduce between processes of one machine, and the link that a ring of them has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from .cache import LinkRates

if TYPE_CHECKING:
    import torch

SHORT_BYTES = 4  # of the short all-reduce
LEAST_SECONDS = 1e-9  # by which the long one is slower, at least

CallSeconds = Callable[[Callable[[], object], int], float]  # times a call that is made so often


class AllReduceSeconds(NamedTuple):
    """Seconds of a short and a long all-reduce."""

    short: float
    long: float


def measure_all_reduce(
    backend: str, rank: int, ranks: int, port: int, device: torch.device, size: int, seconds_of: CallSeconds
) -> AllReduceSeconds:
    """Time all-reduces of SHORT_BYTES and of `size` bytes; every rank calls this with the same arguments but its rank.

    The number of calls is fixed, since all processes must make the same number.
    """
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    short, long = (torch.zeros(count // 4, device=device) for count in (SHORT_BYTES, size))
    dist.all_reduce(short)  # makes the connections
    found = AllReduceSeconds(
        short=seconds_of(lambda: dist.all_reduce(short), 200),
        long=seconds_of(lambda: dist.all_reduce(long), 12),
    )
    dist.destroy_process_group()
    return found


def link_rates(seconds: AllReduceSeconds, size: int, ranks: int) -> LinkRates:
    """Return seconds per hop and bytes/s of a rank in one direction: a ring's all-reduce of S bytes takes 2(n - 1) hops and sends
    2(n - 1)/n S from every rank (`trainer/plan/axes/collectives.py`)."""
    sent = 2.0 * (ranks - 1) / ranks * size
    return {"latency": seconds.short / (2 * (ranks - 1)), "bandwidth": sent / max(seconds.long - seconds.short, LEAST_SECONDS)}
