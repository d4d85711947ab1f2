"""Pipeline parallel: the residual stream handed from stage to stage, its gradient back, and the tied weight's sum."""

from __future__ import annotations

from ..collectives import Wire, cost
from .traffic_row import Line


def lines(payload: int, sends: int, pair: Wire, *, exposed: bool) -> list[Line]:
    """What a stage sends in a step: `sends` tensors of `payload` bytes to its neighbours; hidden messages expose nothing."""
    if sends == 0:
        return []
    sent, seconds = cost("send", payload, pair)
    return [Line("pp", "send", payload, sends, sent * sends, pair.link, seconds * sends, seconds * sends if exposed else 0.0)]


def tied(payload: int, pair: Wire) -> list[Line]:
    """First and last stage add up the gradient of the weight that embedding and head share, once a step."""
    sent, seconds = cost("all_reduce", payload, pair)
    return [Line("pp", "all_reduce", payload, 1, sent, pair.link, seconds, seconds)]
