"""One row of a step's traffic on one rank."""

from __future__ import annotations

from typing import NamedTuple


class TrafficRow(NamedTuple):
    """`count` messages a step of `payload` bytes each on an axis: bytes sent a step, the link, seconds a step and those exposed."""

    axis: str
    verb: str
    payload: int
    count: int
    sent: int
    link: str
    seconds: float
    exposed: float
