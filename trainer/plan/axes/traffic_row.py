"""One line of a step's traffic on one rank."""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """A verb on an axis, `times` times a step with `payload` bytes: bytes sent a step, the link, seconds and those exposed."""

    axis: str
    verb: str
    payload: int
    times: int
    sent: int
    link: str
    seconds: float
    exposed: float
