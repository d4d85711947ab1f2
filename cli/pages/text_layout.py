"""The layout of text on a page: its width, wrapped lines, tables, bars and colours."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

Row = TypeVar("Row")

MIN_WIDTH, DEFAULT_WIDTH, MAX_WIDTH = 72, 80, 120  # columns of a page; its tables need at least 72

UNIT = r"(?:%|[mun]?s|h|min|days|[KMGTPE]?i?B(?:/s)?|[KMGTPE]?FLOP/s)(?![A-Za-z0-9])"
_BREAK = re.compile(rf" (?!{UNIT})")  # a space at which a line may break: any but the one between a figure and its unit

ANSI_CODES = {"bold": "1", "red": "1;31", "green": "1;32", "yellow": "33", "dim": "2"}


@dataclass(frozen=True, kw_only=True)
class Style:
    """The colours and characters that a page may use."""

    colour: bool = False
    blocks: bool = True  # block characters, braille and lines, else ASCII

    def paint(self, text: str, colour: str) -> str:
        """Return text in a colour of CODES, or unchanged where the page has no colours."""
        return f"\x1b[{ANSI_CODES[colour]}m{text}\x1b[0m" if self.colour and text else text

    def bar(self, share: float, width: int) -> str:
        """Return a bar of `width` columns that is filled to `share`; one above 1 is full and ends in an arrow."""
        full, empty, over = ("█", "░", "▶") if self.blocks else ("#", ".", ">")
        filled = min(width, round(share * width))
        return full * (width - 1) + over if share > 1 else full * filled + empty * (width - filled)


def stdout_style() -> Style:
    """Return the style that suits stdout: colours on a terminal, unless NO_COLOR is set; block characters where UTF-8 is written."""
    out = sys.stdout
    colour = out is not None and out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Style(colour=colour, blocks="utf" in (getattr(out, "encoding", None) or "").lower())


def page_width() -> int:
    """Return the columns of a page, between MIN_WIDTH and MAX_WIDTH: COLUMNS, else those of the terminal on stdout, else DEFAULT_WIDTH.

    Mails, logs and new terminals show DEFAULT_WIDTH without breaking lines, and piped output is the same on every machine.
    """
    said = os.environ.get("COLUMNS", "")
    columns = int(said) if said.isascii() and said.isdecimal() and len(said) < 9 else 0
    if not columns and sys.stdout is not None:
        with suppress(OSError, ValueError, AttributeError):
            columns = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else 0
    return min(MAX_WIDTH, max(MIN_WIDTH, columns)) if columns else DEFAULT_WIDTH


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,), gap: str = "  ") -> list[str]:
    """Return rows as lines with aligned columns: those in `left` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [gap.join(_cell(row[at], widths[at], left=at in left) for at in range(len(row))).rstrip() for row in rows]


def narrow_table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,), *, width: int) -> list[str]:
    """Return a table of at most `width` columns, as the first of these that fits.

    A usual table; one with narrow gaps; one whose first column stands on lines of its own; a wrapped line of `heading value` pairs a row.
    """
    for gap in ("  ", " "):
        lines = table(rows, left, gap)
        if max(map(len, lines), default=0) <= width:
            return lines
    rest = table([row[1:] for row in rows], [at - 1 for at in left if at], " ")
    if max(map(len, rest), default=0) + 2 <= width:
        return [line for row, others in zip(rows, rest, strict=True) for line in (*filter(None, [row[0]]), f"  {others}")]
    headings, *others = rows
    return [line for row in others for line in wrap("; ".join(map(_pair, headings, row)), width)]


def _pair(heading: str, value: str) -> str:
    return f"{heading} {value}".strip()


def _cell(text: str, width: int, *, left: bool) -> str:
    return text.ljust(width) if left else text.rjust(width)


def evenly_spaced(rows: Sequence[Row], most: int) -> Sequence[Row]:
    """At most `most` rows at even distances, with the first and the last."""
    if len(rows) <= most:
        return rows
    return [rows[round(at * (len(rows) - 1) / (most - 1))] for at in range(most)]


def with_heading(lines: Sequence[str], style: Style) -> list[str]:
    """Return lines of which the first is a heading."""
    return [style.paint(lines[0], "bold"), *lines[1:]] if lines else []


def wrap(text: str, width: int | None = None, indent: str = "", hang: str = "    ") -> list[str]:
    """Return text as lines of at most `width` columns (default: a page's), broken at spaces but not between a figure and its unit.

    `indent` begins the first line, `hang` the others. A longer word has a line of its own.
    """
    lines, line, width = list[str](), indent, width or page_width()
    for word in _BREAK.split(text):
        joined = f"{line} {word}" if line.strip() else line + word
        if len(joined) > width and line.strip():
            lines.append(line)
            joined = hang + word
        line = joined
    return [*lines, line]
