"""One row of a step's traffic on one rank."""

from __future__ import annotations

from typing import NamedTuple


class TrafficRow(NamedTuple):
    """Messages of `payload` bytes on an axis, sent `times` times in one of `every` steps; bytes sent, the link, seconds and exposed seconds
    are the mean of a step."""

    axis: str
    verb: str
    payload: int
    times: int
    sent: int
    link: str
    seconds: float
    exposed: float
    every: int = 1
