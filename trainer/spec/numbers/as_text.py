"""Numbers as text for sentences and tables: bytes, seconds, counts, rates, shares."""

from __future__ import annotations

from collections.abc import Sequence

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_COUNTS = ("", " k", " M", " B", " T")
_SI = ("", "k", "M", "G", "T", "P", "E")
_TIMES = ((86400.0 * 365.25, "years"), (86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))


def digits(value: float, most: int = 3) -> str:
    """A number with `most` significant digits, whole digits in full: 3.14, 31.4, 314, 3,142."""
    if abs(value) >= 1e9:
        return f"{value:.{most}g}".replace("e+", "e")
    places = next((most - 1 - power for power in range(most - 1) if round(abs(value), most - 1 - power) < 10 ** (power + 1)), 0)
    return f"{value:,.{places}f}"


def size_text(count: float) -> str:
    """Bytes in the unit that suits them: 61.2 GiB."""
    return _scaled_text(count, _BINARY, 1024)


def binary_unit(count: float) -> str:
    """The binary unit that suits a number of bytes; GiB from 0.1 GiB."""
    return "GiB" if count >= 0.1 * 2**30 else size_text(count).partition(" ")[2]


def in_unit(count: float, unit: str, most: int = 3) -> str:
    """Bytes in `unit`, without naming it, for a column whose heading does."""
    number = count / 1024 ** _BINARY.index(unit)
    return digits(number, most) if number == 0 or number >= 0.005 else "<0.01"


def part_of_size(count: float, whole: float) -> str:
    """Bytes used of bytes available: 61.2 of 79.1 GiB, or 12.3 MiB of 2.94 GiB."""
    unit = binary_unit(count)
    return (
        f"{in_unit(count, unit)} of {in_unit(whole, unit)} {unit}"
        if unit == binary_unit(whole)
        else f"{size_text(count)} of {size_text(whole)}"
    )


def size_range_text(count: float, low: float | None, high: float | None) -> str:
    """The ends of a number of bytes in the unit that suits it, in brackets: (37 to 60); "" where one is not known or both are the same."""
    return "" if low is None or high is None else _range_text(*(in_unit(each, binary_unit(count), 2) for each in (low, high)))


def count_text(value: float) -> str:
    """A count of parameters, tokens or steps: 175 B, 1.01 T; below 100,000 in full."""
    return f"{value:,.0f}" if abs(value) < 1e5 else _scaled_text(value, _COUNTS, 1000)


def rate_text(value: float, unit: str) -> str:
    """A rate with an SI prefix: 163 TFLOP/s."""
    return _scaled_text(value, tuple(f" {prefix}{unit}" for prefix in _SI), 1000)


def seconds_text(value: float) -> str:
    """Seconds in the unit that suits them: 12.3 ms, 65.2 s, 148 years."""
    if value == 0:
        return "0 s"
    unit, name = time_unit(value)
    return f"{digits(value / unit)} {name}"


def seconds_range_text(value: float, low: float | None, high: float | None) -> str:
    """The ends of seconds in the unit that suits them, in brackets: (1.0 to 1.5); "" where one is not known or both are the same."""
    unit, _ = time_unit(value)
    return "" if low is None or high is None else _range_text(digits(low / unit, 2), digits(high / unit, 2))


def share_text(value: float) -> str:
    """A fraction of one as a percentage: 47.1 %."""
    return f"{100 * value:.1f} %"


def plural(number: int, noun: str) -> str:
    """A number with its noun, singular or plural: 1 node, 384 nodes."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _range_text(low: str, high: str) -> str:
    return f" ({low} to {high})" if low != high else ""


def time_unit(value: float) -> tuple[float, str]:
    """(seconds, name) of the unit that suits a time: (0.001, ms) for 0.02."""
    return next(((unit, name) for unit, name in _TIMES if value * 1.0005 >= unit * (2 if unit >= 60 else 1)), (1e-6, "us"))


def _scaled_text(value: float, units: Sequence[str], step: int) -> str:
    power = 0
    while power < len(units) - 1 and abs(round(value, 0 if abs(value) >= 100 else 1)) >= step:
        value, power = value / step, power + 1
    unit = units[power]
    number = f"{value:,.0f}" if step == 1024 and power == 0 else digits(value)
    return f"{number} {unit}" if unit and not unit.startswith(" ") else f"{number}{unit}"
