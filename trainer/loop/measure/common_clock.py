"""One clock for all ranks: by how much the clocks of other machines differ from rank 0's."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

ROUND_TRIPS = 16
BOOT = Path("/proc/sys/kernel/random/boot_id")  # of Linux: the same in all containers of a machine
CLOCK = Path("/proc/self/ns/time")  # the namespace in which the machine's clock is read


@dataclass(frozen=True, kw_only=True)
class CommonClock:
    """This rank's clock beside rank 0's: `offset` seconds are to be added, with an error of at most `error`; `origin` is a moment on rank
    0's; `name` is the same on all ranks and on no earlier clock."""

    offset: float
    error: float
    origin: float
    name: str

    def seconds(self, at: float) -> float:
        """Seconds from the origin to a moment of this rank's clock."""
        return at + self.offset - self.origin


def machine_name() -> str:
    """Return what processes have in common whose perf_counter is the same."""
    with suppress(OSError):
        return f"{BOOT.read_text().strip()} {os.readlink(CLOCK)}"
    return platform.node()


def common_clock(group: dist.ProcessGroup, rank: int, machine: str, now: Callable[[], float] = perf_counter) -> CommonClock:
    """Compare this rank's clock with rank 0's; all ranks of the group, one of gloo, call this together.

    The first rank of each other machine asks rank 0 for its time some times; in the shortest round trip the answer was under way for half
    of it, give or take that half (as in NTP, RFC 5905).
    """
    machines: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(machines, machine, group=group)
    askers = sorted({machines.index(each) for each in machines} - {machines.index(machines[0])})
    own = (0.0, 0.0)
    for asker in askers:
        if rank == 0:
            _answer(group, asker, now)
        elif rank == asker:
            own = _ask(group, now)
    measured: list[Any] = [None] * len(machines)
    dist.all_gather_object(measured, (*own, now(), os.urandom(6).hex()), group=group)
    offset, error = measured[machines.index(machine)][:2]
    return CommonClock(offset=offset, error=error, origin=measured[0][2], name=measured[0][3])


def _answer(group: dist.ProcessGroup, asker: int, now: Callable[[], float]) -> None:
    question = torch.zeros(1)
    for _ in range(ROUND_TRIPS):
        dist.recv(question, asker, group=group)
        dist.send(torch.tensor([now()], dtype=torch.float64), asker, group=group)


def _ask(group: dist.ProcessGroup, now: Callable[[], float]) -> tuple[float, float]:
    """(seconds that rank 0's clock is ahead, the error of that)."""
    answer, trips = torch.zeros(1, dtype=torch.float64), []
    for _ in range(ROUND_TRIPS):
        sent = now()
        dist.send(torch.zeros(1), 0, group=group)
        dist.recv(answer, 0, group=group)
        half = (now() - sent) / 2
        trips.append((half, float(answer) - sent - half))
    error, offset = min(trips)
    return offset, error
