"""The durations of the parts of a save."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter


class SaveTimers:
    """Sums the seconds of each part of a save; parts that overlap are each counted in full."""

    def __init__(self) -> None:
        self._began = perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def time_part(self, name: str) -> Iterator[None]:
        """Add the duration of the block to this part."""
        began = perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += perf_counter() - began

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part so far, and `total`, wall-clock time."""
        return {**self._seconds, "total": perf_counter() - self._began}


def slowest_parts(durations: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the seconds of each part on the rank that took longest for it."""
    longest: dict[str, float] = defaultdict(float)
    for each in durations:
        for name, seconds in each.items():
            longest[name] = max(longest[name], seconds)
    return dict(longest)
