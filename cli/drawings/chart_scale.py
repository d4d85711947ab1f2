"""The scale of one side of a chart: where a value lies, in pixels, and which values have a tick."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, log10

from ...trainer.spec.numbers.as_text import count_text

MOST_TICKS = 7
SMALLEST = 1e-9  # a range that is a smaller share of its values is drawn as one value
UNITS = ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k"))  # of counts, the same for all ticks of an even scale
STEPS = (1.0, 2.0, 5.0, 10.0)  # times a power of ten: the distance of two ticks


@dataclass(frozen=True, kw_only=True)
class ChartScale:
    """Values from `low` to `high` along the pixels from `start` to `end`, in equal steps or, where it is logarithmic, in equal ratios."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def position(self, value: float) -> float:
        """The pixel of a value."""
        low, high, at = (log10(each) if self.logarithmic else each for each in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values between the ends, at most MOST_TICKS, ascending."""
        found = _ratio_ticks(self.low, self.high) if self.logarithmic else _even_ticks(self.low, self.high)
        return [each for each in found if self.low <= each <= self.high]

    def tick_texts(self) -> list[tuple[float, str]]:
        """Each tick with its text, with as many places as tell ticks apart."""
        ticks = self.ticks()
        nearest = min((after - before for before, after in pairwise(ticks)), default=abs(ticks[0]) if ticks else 0.0)
        places = max(0, -floor(log10(nearest) + 1e-9)) if nearest > 0 else 0
        if places:
            return [(each, f"{each:.{places}f}" if places < MOST_TICKS else f"{each:.3g}") for each in ticks]
        if self.logarithmic or max(ticks, default=0.0) < 1e5:
            return [(each, count_text(each)) for each in ticks]
        unit, name = next(pair for pair in UNITS if max(ticks) >= pair[0])
        return [(each, f"{each / unit:g}{name}" if each else "0") for each in ticks]


def loose_scale(values: list[float], start: float, end: float, *, floor_at: float | None = None, logarithmic: bool = False) -> ChartScale:
    """The scale of values with some room at both ends; `floor_at` is a value that it begins at where none is lower."""
    low, high = min(values), max(values)
    if logarithmic:
        room = max(1.02, (high / low) ** 0.04)
        return ChartScale(low=low / room, high=high * room, start=start, end=end, logarithmic=True)
    if floor_at is not None:
        low = min(low, floor_at)
    room = 0.05 * (high - low)
    if room < SMALLEST * abs(high):
        room = 0.05 * abs(high)
    room = room or 1.0
    return ChartScale(low=low if low == floor_at else low - room, high=high + room, start=start, end=end)


def _even_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / (MOST_TICKS - 1)
    power = 10.0 ** floor(log10(rough))
    step = next(each * power for each in STEPS if each * power >= rough * (1 - 1e-9))
    return [float(f"{number * step:.12g}") for number in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def _ratio_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten; of many decades, some powers of ten; of less than a decade, as on an even scale."""
    first, last = floor(log10(low)), ceil(log10(high))
    every = [each * 10.0**power for power in range(first, last + 1) for each in STEPS[:3]]
    inside = [each for each in every if low <= each <= high]
    if len(inside) < 3:
        return [each for each in _even_ticks(low, high) if each > 0]
    if len(inside) <= MOST_TICKS:
        return inside
    powers = [10.0**power for power in range(first, last + 1) if low <= 10.0**power <= high]
    return powers[:: ceil(len(powers) / MOST_TICKS)]
