"""Parses quantities with units (`80GiB`, `25 GB/s`, `400 Gbps`, `312 TFLOP/s`, `5us`) to SI numbers, without guessing."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ..keys.units import unit_of

_QUANTITY = re.compile(r"(?P<number>[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<unit>[^\d\s.,+-].*)?")
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTPE", 1)}
_PREFIXES = {**_DECIMAL, **_BINARY, "m": 1e6, "g": 1e9, "t": 1e12}  # lower case: only in gbps
_PER_SECOND = r"(?:/s|/sec|/second|ps)"
# (multiplier, divisor) to SI: with a divisor, 5us is exactly 5e-6.
_TIMES = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), (1.0, 1.0)),
    **dict.fromkeys(("ms", "msec"), (1.0, 1e3)),
    **dict.fromkeys(("us", "usec", "\u00b5s", "\u03bcs"), (1.0, 1e6)),
    **dict.fromkeys(("ns", "nsec"), (1.0, 1e9)),
    **dict.fromkeys(("min", "minute", "minutes"), (60.0, 1.0)),
    **dict.fromkeys(("h", "hour", "hours"), (3600.0, 1.0)),
    **dict.fromkeys(("d", "day", "days"), (86400.0, 1.0)),
}
_ANY = "|".join([*_BINARY, *filter(None, _DECIMAL)])
_SIZE = re.compile(rf"({_ANY})?B|bytes?")
_BYTE_RATE = re.compile(rf"({_ANY})?(?:B|bytes?){_PER_SECOND}")
_BIT_RATE = re.compile(rf"(?:({_ANY})?(?:b|bits?){_PER_SECOND}|([kmgt])bps)")
_FLOP_RATE = re.compile(r"([kKMGTPE])?(?:FLOPs?/s|flops?/s|FLOPS|FLOPs|flops|Flops)")


@dataclass(frozen=True)
class Dimension:
    """The dimension of a unit: its noun in messages, example values, and its SI unit."""

    noun: str
    forms: tuple[str, ...]
    unit: str


def dimension_of(key: str) -> Dimension | None:
    """Return the dimension of a key's values; None if they have no units."""
    unit = unit_of(key)
    if unit.startswith("bytes/s"):
        per = " per GPU" if "GPU" in unit else ""
        return Dimension("rate", ("25e9", "25GB/s", "200Gb/s"), f"bytes/s{per}")
    if unit.startswith("bytes"):
        return Dimension("size", ("80e9", "80GB", "80GiB"), "bytes")
    if unit == "FLOP/s":
        return Dimension("rate", ("312e12", "312TFLOP/s"), "FLOP/s")
    if unit.startswith("seconds"):
        return Dimension("time", ("5e-6", "5us"), "seconds")
    return None


def parse_quantity(text: str, of: Dimension) -> float | None:
    """Return the SI value of a text in a dimension; None if it has none or is ambiguous."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match["unit"] is None:
        return None
    factor = _factor(match["unit"].strip(), of)
    return None if factor is None else float(match["number"].replace("_", "")) * factor[0] / factor[1]


def _factor(unit: str, of: Dimension) -> tuple[float, float] | None:
    """Return (multiplier, divisor) from a unit to SI."""
    if of.noun == "time":
        return _TIMES.get(unit)
    bits = 1.0
    if of.noun == "size":
        match = _SIZE.fullmatch(unit)
    elif of.unit == "FLOP/s":
        match = _FLOP_RATE.fullmatch(unit)
    elif (match := _BYTE_RATE.fullmatch(unit)) is None:
        match, bits = _BIT_RATE.fullmatch(unit), 8.0
    return (_PREFIXES[next(filter(None, match.groups()), "")], bits) if match else None


def suggest_quantity(text: str, of: Dimension) -> str:
    """Return a hint how to write a text that could not be parsed: each of its likely meanings."""
    match = _QUANTITY.fullmatch(text.strip())
    readings = list(_readings(match["number"].replace("_", ""), (match["unit"] or "").strip(), of)) if match else []
    return f"write {' or '.join(readings or _join_forms(of.forms))} ({of.unit})"


def _join_forms(forms: tuple[str, ...]) -> list[str]:
    return [", ".join(forms[:-1]), forms[-1]]


def _readings(number: str, unit: str, of: Dimension) -> list[str]:
    """Return a number with each unit that it may mean, if its prefix is clear."""
    prefix = re.match(r"([kKmMgGtTpP])(i?)", unit)
    if of.noun == "time":
        return [f"{number}ms", f"{number}min"] if unit in ("m", "M") else []
    if prefix is None:
        return []
    letter = prefix[1].upper().replace("K", "k")
    if of.noun == "size":
        return [f"{number}{letter}B", f"{number}{letter.upper()}iB"] if not prefix[2] else [f"{number}{letter.upper()}iB"]
    if of.unit == "FLOP/s":
        return [f"{number}{letter}FLOP/s"]
    rest = unit[prefix.end() :]
    bits, bytes_ = f"{number}{letter}b/s", f"{number}{letter}B/s"
    if rest.startswith("B"):
        return [bytes_]
    return [bits, _short_number(float(number) * _DECIMAL[letter] / 8)] if rest == "b" and unit[0].isupper() else [bits, bytes_]


def count_readings(text: str) -> tuple[str, ...]:
    """Return the possible values of a count with a suffix, such as `4k`; () for any other text."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)\s?([kKmMgGbBtT])", text.strip())
    if match is None:
        return ()
    number, letter = float(match[1].replace("_", "")), match[2].upper()
    power = {"K": 1, "M": 2, "G": 3, "B": 3, "T": 4}[letter]
    readings = [number * 1000**power, *([number * 1024**power] if letter in "KMG" else [])]
    return tuple(f"{each:.0f}" if each < 1e7 else _short_number(each) for each in readings)


def _short_number(value: float) -> str:
    """Return a large number in short form: 50e9."""
    power = 3 * int(math.log10(value) // 3) if value > 0 else 0
    return f"{value / 10**power:g}e{power}" if power > 3 else f"{value:g}"
