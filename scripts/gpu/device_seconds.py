"""The seconds of a call on the device, the mean of many calls."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch


def mean_seconds(act: Callable[[], object], enough: float) -> float:
    """Return the mean seconds of as many calls as fit into about `enough` seconds; the host launches them without waiting. The first two
    calls are not counted."""
    act()
    act()
    calls, taken = 1, 0.0
    while taken < enough / 2:
        calls = max(2 * calls, min(4096, int(calls * enough / taken))) if taken else 1
        wait_for_device()
        began = perf_counter()
        for _ in range(calls):
            act()
        wait_for_device()
        taken = perf_counter() - began
    return taken / calls


def wait_for_device() -> None:
    """Wait until a GPU has run what was launched; a CPU has."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
