"""The seconds of a call on a device: the mean of many calls, their median, or the fastest of them."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter


def mean_seconds(act: Callable[[], object], enough: float) -> float:
    """Return the mean seconds of as many calls as fit into about `enough` seconds; the host launches them without waiting. The first two
    calls are not counted."""
    act()
    act()
    calls, taken = 1, 0.0
    while taken < enough / 2:
        calls = max(2 * calls, min(4096, int(calls * enough / taken))) if taken else 1
        taken = calls * mean_of_calls(act, calls)
    return taken / calls


def mean_of_calls(act: Callable[[], object], calls: int) -> float:
    """Return the mean seconds of so many calls, which the host launches without waiting."""
    wait_for_device()
    began = perf_counter()
    for _ in range(calls):
        act()
    wait_for_device()
    return (perf_counter() - began) / calls


def fastest_call(act: Callable[[], object], enough: float) -> float:
    """Return the seconds of the fastest call of all that fit into `enough` seconds: of calls on a CPU, some of which other work on the
    machine slows. The first call is not counted."""
    act()
    best, start = float("inf"), perf_counter()
    while perf_counter() - start < enough:
        best = min(best, _one_call(act))
    return best


def median_call(act: Callable[[], object], times: int) -> float:
    """Return the median seconds of so many calls on a CPU. The first call is not counted."""
    act()
    return median(_one_call(act) for _ in range(times))


def _one_call(act: Callable[[], object]) -> float:
    began = perf_counter()
    act()
    return perf_counter() - began


def wait_for_device() -> None:
    """Wait until a GPU has run what was launched; a CPU has."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
