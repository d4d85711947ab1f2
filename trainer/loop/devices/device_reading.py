"""What the work gave on each device, and the judgement: which device is slow, which computes wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from ...spec.numbers.as_text import plural

# Times the median of its kind from which a device is slow. Clocks of GPUs of one kind differ by less unless one is throttled (a guess: no
# fleet was measured). Cores of a CPU share caches and may be two threads of one: with eight processes on two cores, of 870 readings one in
# a hundred took up to 1.7 times the median of its process, and the longest 2.1 times.
SLOW_FACTORS = {"cuda": 1.25, "cpu": 3.0}


@dataclass(frozen=True, kw_only=True)
class DeviceReading:
    """The work on the device of one rank: seconds, a checksum of the result's bits. Without them the device had no room for the work."""

    rank: int
    host: str
    device: str  # by its name for people
    kind: str  # readings of one kind can be compared
    seconds: float | None = None
    bits: int | None = None
    repeats: bool = True  # all repeats of the work had the same bits, those of earlier checks of this run too

    @property
    def where(self) -> str:
        """The rank, its host and its device."""
        return f"rank {self.rank} ({self.host}, {self.device})"


def wrong_devices(readings: Sequence[DeviceReading]) -> dict[int, str]:
    """Return how each wrong device was found, by its rank: it does not repeat itself, or departs from a strict majority of its kind."""
    found = {each.rank: "it gives other bits than before for the same work" for each in readings if not each.repeats}
    for alike in _by_kind(readings):
        (bits, agree), *_ = Counter(each.bits for each in alike).most_common(1)
        if 2 * agree > len(alike):  # where one departs, of three or more
            why = f"its bits differ from those of {agree} of {plural(len(alike), 'device')} of its kind for the same work"
            found |= {each.rank: why for each in alike if each.bits != bits and each.rank not in found}
    return found


def differing_devices(readings: Sequence[DeviceReading]) -> list[tuple[DeviceReading, DeviceReading]]:
    """Return two devices that differ in their bits of each kind in which no majority tells which of them are right."""
    pairs = []
    for alike in _by_kind(readings):
        (_, agree), *_ = Counter(each.bits for each in alike).most_common(1)
        if 2 * agree <= len(alike):
            other = next(each for each in alike if each.bits != alike[0].bits)
            pairs.append((alike[0], other))
    return pairs


def slow_devices(readings: Sequence[DeviceReading], device: str, factors: Mapping[str, float] = SLOW_FACTORS) -> dict[int, float]:
    """Return by rank how many times the (lower) median of its kind each slow device takes; `device` is torch's type, cuda or cpu."""
    found = dict[int, float]()
    for alike in _by_kind(readings):
        middle = median_low(each.seconds or 0.0 for each in alike)
        found |= {each.rank: each.seconds / middle for each in alike if each.seconds and middle and each.seconds > factors[device] * middle}
    return found


def step_share(factor: float, computing: float) -> float:
    """Return the share of a step that is lost at most to a device which takes `factor` times as long, where computing is this share of a
    step on the others."""
    longer = computing * (factor - 1)
    return longer / (1 + longer)


def _by_kind(readings: Sequence[DeviceReading]) -> Iterator[list[DeviceReading]]:
    """Yield the readings of each kind that have figures."""
    kinds: dict[str, list[DeviceReading]] = {}
    for each in readings:
        if each.bits is not None:
            kinds.setdefault(each.kind, []).append(each)
    yield from kinds.values()
