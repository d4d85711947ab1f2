"""A line on the terminal that says how far long work has come."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import TypeVar

INTERVAL = 0.5  # seconds between two lines
Item = TypeVar("Item")


def show_progress(items: Iterable[Item], done: str, count: int) -> Iterator[Item]:
    """Yield the items; on a terminal show how many weights of `count` are `done` (a participle), and clear the line at the end."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield from items
        return
    last = monotonic()
    try:
        for at, item in enumerate(items):
            if monotonic() - last >= INTERVAL:
                last = monotonic()
                print(f"\r{at} of {count} weights {done}", end="", file=sys.stderr, flush=True)
            yield item
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
