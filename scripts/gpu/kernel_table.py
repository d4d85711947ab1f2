"""Reads a profiler's trace: the kernels of the device, their launches and seconds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

NAME = 160  # characters of a kernel's name that are kept
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the one profiler's trace in RUN_DIR/trace."""
    (file,) = (folder / "trace").glob("*.json")
    return events_of(file.read_text(encoding="utf-8"))


def events_of(trace: str) -> list[dict[str, Any]]:
    """Return the events of a profiler's trace, which is JSON."""
    events: list[dict[str, Any]] = json.loads(trace)["traceEvents"]
    return events


def longest_kernels(events: Sequence[dict[str, Any]], steps: int, most: int) -> dict[str, list[float]]:
    """Return [launches, seconds] a step by kernel, copies and fills included, of the `most` that took longest."""
    seconds, launches = Counter[str](), Counter[str]()
    for event in events:
        if event.get("cat") in ON_DEVICE:
            name = str(event["name"])[:NAME]
            seconds[name] += event["dur"] / 1e6 / steps
            launches[name] += 1
    return {name: [launches[name] / steps, taken] for name, taken in seconds.most_common(most)}


def busy_seconds(events: Sequence[dict[str, Any]]) -> float:
    """Return the seconds in which at least one kernel, copy or fill was on the device."""
    busy, until = 0.0, 0.0
    for begins, ends in sorted(_spans(events)):
        busy += max(0.0, ends - max(begins, until))
        until = max(until, ends)
    return busy


def _spans(events: Sequence[dict[str, Any]]) -> Iterator[tuple[float, float]]:
    """Yield when each began and ended, in seconds."""
    for event in events:
        if event.get("cat") in ON_DEVICE:
            yield event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
