"""The seconds of a call on a device: the mean of many calls, or the fastest of them."""

from __future__ import annotations

from collections.abc import Callable
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


def fastest_call(act: Callable[[], object], enough: float, *, times: int | None = None) -> float:
    """Return the seconds of the fastest call, of `times` calls or of all that fit into `enough` seconds: of calls on a CPU, some of which
    other work on the machine slows. The first call is not counted."""
    act()
    best, start, count = float("inf"), perf_counter(), 0
    while count < times if times else perf_counter() - start < enough:
        began = perf_counter()
        act()
        best, count = min(best, perf_counter() - began), count + 1
    return best


def wait_for_device() -> None:
    """Wait until a GPU has run what was launched; a CPU has."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
