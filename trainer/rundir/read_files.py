"""Reading the JSON files of a run's folder, also damaged ones: what is not as `distrain fit` writes it is left out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from ..system.regular_file import open_plain, read_plain

MOST_BYTES = 1 << 30  # of run.json and its like: a plan lists every stage
LONGEST_LINE = 1 << 16  # bytes of a line of metrics.jsonl
LARGEST = 1e30  # a larger number is no measurement


def read_mapping(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None where it holds none. Raises FileNotFoundError."""
    try:
        found = json.loads(read_plain(file, MOST_BYTES))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, one a line; other lines are left out, such as one that a crash cut short."""
    for line in read_lines(file):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def read_lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a plain file, cut at LONGEST_LINE; none where it can't be read."""
    try:
        with open_plain(file) as lines:
            at_start = True
            while line := lines.readline(LONGEST_LINE):
                if at_start:
                    yield line
                at_start = line.endswith(b"\n")
    except OSError:
        return


def nested_value(found: Any, *keys: str | int) -> Any:
    """Return the value at `keys` in nested mappings and lists; None where there is none."""
    for key in keys:
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list) and isinstance(key, int) and 0 <= key < len(found):
            found = found[key]
        else:
            return None
    return found


def finite_number(value: Any) -> float | None:
    """Return the value if it is a plausible finite number."""
    figure = isinstance(value, int | float) and not isinstance(value, bool)
    return value if figure and isfinite(value) and abs(value) <= LARGEST else None


def whole_number(value: Any) -> int | None:
    """Return the value if it is a count."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None
