"""The recent values of a figure of a step, and how far a new one is above them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from statistics import median

RECENT = 64  # values that a new one is compared with
FEWEST = 16  # fewer are compared with nothing
SIGMA_PER_MAD = 1.4826  # standard deviation over the median absolute deviation, of a normal distribution


class RecentValues:
    """The last values of a figure. Scores are based on medians, which earlier spikes barely move."""

    def __init__(self, least_spread: float, least_middle: float, values: Sequence[float] = ()) -> None:
        """`least_spread`: the smallest spread, as a share of the median or, where that is less, of `least_middle`."""
        self._least_spread, self._least_middle = least_spread, least_middle
        self._values: deque[float] = deque(values, maxlen=RECENT)

    def add(self, value: float) -> None:
        """Add the value of the newest step."""
        self._values.append(value)

    def values(self) -> list[float]:
        """Return the values that a new one is compared with, oldest first."""
        return list(self._values)

    def score(self, value: float) -> float:
        """Return how many deviations a value is above the median (a robust z-score); 0 where few values are known."""
        if len(self._values) < FEWEST:
            return 0.0
        middle, spread = self._middle_and_spread()
        return (value - middle) / spread

    def limit(self, score: float) -> float:
        """Return the value with a score; infinity where few values are known."""
        if len(self._values) < FEWEST:
            return inf
        middle, spread = self._middle_and_spread()
        return middle + score * spread

    def _middle_and_spread(self) -> tuple[float, float]:
        middle = median(self._values)
        spread = SIGMA_PER_MAD * median(abs(each - middle) for each in self._values)
        return middle, max(spread, self._least_spread * max(abs(middle), self._least_middle))
