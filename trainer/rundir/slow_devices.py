"""The devices that a run's checks found slow, read from its metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .metric_rows import SLOW_KEY
from .read_files import finite_number, nested_value, whole_number


@dataclass(frozen=True, kw_only=True)
class SlowDevice:
    """A device that checks found slow: how many times as long as its kind's median it took at most, and the share of a step that it may
    have cost then; the first and the last step at which it was found."""

    rank: int
    host: str
    device: str
    factor: float
    step_share: float
    first: int
    last: int


def slow_devices(rows: Sequence[Mapping[str, Any]]) -> Iterator[SlowDevice]:
    """The slow devices, each once, in the order in which they were found."""
    found: dict[tuple[int, str, str], list[tuple[int, float, float]]] = {}
    for row in rows:
        step, devices = whole_number(row.get("step")), row.get(SLOW_KEY)
        for each in devices if isinstance(devices, list) else ():
            rank, host, device = (nested_value(each, key) for key in ("rank", "host", "device"))
            factor, share = (finite_number(nested_value(each, key)) for key in ("factor", "step_share"))
            if step is None or factor is None or share is None:
                continue
            if isinstance(rank, int) and isinstance(host, str) and isinstance(device, str):
                found.setdefault((rank, host, device), []).append((step, factor, share))
    for (rank, host, device), times in found.items():
        steps, factors, shares = zip(*times, strict=True)
        yield SlowDevice(
            rank=rank, host=host, device=device, factor=max(factors), step_share=max(shares), first=min(steps), last=max(steps)
        )
