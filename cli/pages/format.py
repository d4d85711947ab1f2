"""Numbers as people read them: bytes, seconds, counts, rates, shares, bars and tables."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

WOULD_REFUSE = "`fit` would refuse this here"  # how a plan's warnings of this machine's files begin
LEAST, USUAL, MOST = 72, 80, 120  # columns of a page: its tables want as many

_BREAK = re.compile(r" (?!(?:%|[mun]?s|h|min|days|[KMGTPE]?i?B(?:/s)?|[KMGTPE]?FLOP/s)(?![A-Za-z0-9]))")

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_COUNTS = ("", " k", " M", " B", " T")
_SI = ("", "k", "M", "G", "T", "P", "E")
_TIMES = ((86400.0 * 365.25, "years"), (86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))

CODES = {"bold": "1", "red": "1;31", "green": "1;32", "yellow": "33", "dim": "2"}


@dataclass(frozen=True, kw_only=True)
class Look:
    """What the page at hand can show: colours on a terminal, block characters where they can be encoded."""

    colour: bool = False
    blocks: bool = True

    def paint(self, words: str, colour: str) -> str:
        """Words in a colour, or as they are."""
        return f"\x1b[{CODES[colour]}m{words}\x1b[0m" if self.colour and words else words

    def bar(self, share: float, width: int) -> str:
        """A bar of `share` of `width` columns; one that runs over ends in a mark."""
        full, empty, over = ("█", "░", "▶") if self.blocks else ("#", ".", ">")
        columns = min(width, round(share * width))
        return full * (width - 1) + over if share > 1 else full * columns + empty * (width - columns)


def look() -> Look:
    """What stdout can show: colour on a terminal only; block characters where they can be written."""
    out = sys.stdout
    colour = out is not None and out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Look(colour=colour, blocks="utf" in (getattr(out, "encoding", None) or "").lower())


def width() -> int:
    """Columns of a page: what COLUMNS says, else what the terminal on stdout has, between LEAST and MOST; elsewhere USUAL, which mails,
    logs and new terminals show whole, so that what is piped is the same everywhere."""
    said = os.environ.get("COLUMNS", "")
    columns = int(said) if said.isascii() and said.isdecimal() and len(said) < 9 else 0
    if not columns and sys.stdout is not None:
        with suppress(OSError, ValueError, AttributeError):
            columns = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else 0
    return min(MOST, max(LEAST, columns)) if columns else USUAL


def digits(value: float, most: int = 3) -> str:
    """A number to so many digits, whole ones in full: 3.14, 31.4, 314, 3,142."""
    if abs(value) >= 1e9:
        return f"{value:.{most}g}".replace("e+", "e")
    places = next((most - 1 - power for power in range(most - 1) if round(abs(value), most - 1 - power) < 10 ** (power + 1)), 0)
    return f"{value:,.{places}f}"


def size(count: float) -> str:
    """Bytes, as 61.2 GiB."""
    return _scaled(count, _BINARY, 1024)


def unit_of(count: float) -> str:
    """The unit in which bytes read well; GiB from a tenth of one."""
    return "GiB" if count >= 0.1 * 2**30 else size(count).partition(" ")[2]


def in_unit(count: float, unit: str) -> str:
    """Bytes in a unit that is said elsewhere, such as a column's heading."""
    number = count / 1024 ** _BINARY.index(unit)
    return digits(number) if number == 0 or number >= 0.005 else "<0.01"


def part(count: float, whole: float) -> str:
    """Bytes of bytes: 61.2 of 79.1 GiB, or 12.3 MiB of 2.94 GiB."""
    unit = unit_of(count)
    return f"{in_unit(count, unit)} of {in_unit(whole, unit)} {unit}" if unit == unit_of(whole) else f"{size(count)} of {size(whole)}"


def count(value: float) -> str:
    """A count of parameters, tokens or steps: 175 B, 1.01 T; below 100,000 in full."""
    return f"{value:,.0f}" if abs(value) < 1e5 else _scaled(value, _COUNTS, 1000)


def rate(value: float, unit: str) -> str:
    """A rate, as 163 TFLOP/s."""
    return _scaled(value, tuple(f" {prefix}{unit}" for prefix in _SI), 1000)


def seconds(value: float) -> str:
    """A time, as 12.3 ms, 65.2 s, 148 years."""
    if value == 0:
        return "0 s"
    for unit, name in _TIMES:
        if value * 1.0005 >= unit * (2 if unit >= 60 else 1):
            return f"{digits(value / unit)} {name}"
    return f"{digits(value * 1e6)} us"


def share(value: float) -> str:
    """A part of one, as 47.1 %."""
    return f"{100 * value:.1f} %"


def many(number: int, noun: str) -> str:
    """A number with its noun: 1 node, 384 nodes."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def one_line(words: str) -> str:
    """Words with every control character written out, so that one message is one line."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in words)


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,), gap: str = "  ") -> list[str]:
    """Rows as aligned lines: columns in `left` to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [gap.join(_cell(row[at], widths[at], at in left) for at in range(len(row))).rstrip() for row in rows]


def narrow_table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,), *, room: int) -> list[str]:
    """Rows as aligned lines of at most `room` columns: closer where that is needed, or the first column on lines of its own."""
    for gap in ("  ", " "):
        lines = table(rows, left, gap)
        if max(map(len, lines), default=0) <= room:
            return lines
    rest = table([row[1:] for row in rows], [at - 1 for at in left if at], " ")
    if max(map(len, rest), default=0) + 2 <= room:
        return [line for row, others in zip(rows, rest, strict=True) for line in (*filter(None, [row[0]]), f"  {others}")]
    heads, *others = rows
    return [line for row in others for line in wrapped("; ".join(map(_pair, heads, row)), room)]


def _pair(head: str, cell: str) -> str:
    return f"{head} {cell}".strip()


def _cell(words: str, width: int, left: bool) -> str:
    return words.ljust(width) if left else words.rjust(width)


def wrapped(words: str, room: int | None = None, indent: str = "", hang: str = "    ") -> list[str]:
    """Words on lines of at most `room` columns, a page's where none are said, broken at spaces, but not between a figure and its unit."""
    lines, line, room = list[str](), indent, room or width()
    for word in _BREAK.split(words):
        joined = f"{line} {word}" if line.strip() else line + word
        if len(joined) > room and line.strip():
            lines.append(line)
            joined = hang + word
        line = joined
    return [*lines, line]


def _scaled(value: float, units: Sequence[str], step: int) -> str:
    power = 0
    while power < len(units) - 1 and abs(round(value, 0 if abs(value) >= 100 else 1)) >= step:
        value, power = value / step, power + 1
    unit = units[power]
    number = f"{value:,.0f}" if step == 1024 and power == 0 else digits(value)
    return f"{number} {unit}" if unit and not unit.startswith(" ") else f"{number}{unit}"
