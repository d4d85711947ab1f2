"""JSON of a run's folder, whatever has become of it: what is not as `distrain fit` writes it is left out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from ..spec.plain_file import open_plain, read_plain

MOST_BYTES = 1 << 30  # of run.json and its like: a plan lists every stage
LONGEST = 1 << 16  # bytes of a line of metrics.jsonl
LARGEST = 1e30  # a figure beyond is no measurement


def read_mapping(file: Path) -> dict[str, Any] | None:
    """A file that holds one object of JSON; None where it holds none. Raises FileNotFoundError."""
    try:
        found = json.loads(read_plain(file, MOST_BYTES))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file that holds one a line; a line that is none, or too long, is left out, such as one that a crash cut short."""
    for line in read_lines(file):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def read_lines(file: Path) -> Iterator[bytes]:
    """The lines of a plain file, the beginnings of those that are too long; none where it can't be read."""
    try:
        with open_plain(file) as lines:
            begins = True
            while line := lines.readline(LONGEST):
                if begins:
                    yield line
                begins = line.endswith(b"\n")
    except OSError:
        return


def at(found: Any, *keys: str | int) -> Any:
    """What is inside nested mappings and lists; None where there is no such thing."""
    for key in keys:
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list) and isinstance(key, int) and 0 <= key < len(found):
            found = found[key]
        else:
            return None
    return found


def number(value: Any) -> float | None:
    """A figure as it is, if it is one."""
    figure = isinstance(value, int | float) and not isinstance(value, bool)
    return value if figure and isfinite(value) and abs(value) <= LARGEST else None


def natural(value: Any) -> int | None:
    """A count as it is, if it is one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None
