"""Seconds of a save by its parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter


class Clock:
    """Adds up the seconds of each part of a piece of work; parts that overlap are each counted in full."""

    def __init__(self) -> None:
        self._began = perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The time inside counts for this part."""
        began = perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += perf_counter() - began

    def seconds(self) -> dict[str, float]:
        """Seconds of each part so far, and of all (`total`, by the wall)."""
        return {**self._seconds, "total": perf_counter() - self._began}


def slowest(clocks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of each part on the rank that took longest for it."""
    longest: dict[str, float] = defaultdict(float)
    for clock in clocks:
        for name, seconds in clock.items():
            longest[name] = max(longest[name], seconds)
    return dict(longest)
