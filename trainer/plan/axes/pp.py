"""Pipeline parallelism: hidden states travel from stage to stage, gradients back, and a tied weight's gradient is summed."""

from __future__ import annotations

from .axis import Axis
from .collectives import Wire, collective_cost
from .traffic_row import TrafficRow

AXIS = Axis(name="pp", splits=("layers",), overlap="pipeline", source="arXiv:1811.06965")


def stage_sends(payload: int, sends: int, pair: Wire, *, exposed: bool) -> list[TrafficRow]:
    """Traffic of a stage in one step: `sends` tensors of `payload` bytes to its neighbours; overlapped messages expose no time."""
    if sends == 0:
        return []
    sent, seconds = collective_cost("send", payload, pair)
    return [TrafficRow("pp", "send", payload, sends, sent * sends, pair.link, seconds * sends, seconds * sends if exposed else 0.0)]


def send_seconds(payload: int, pair: Wire) -> float:
    """Seconds of one tensor of `payload` bytes between neighbours."""
    return collective_cost("send", payload, pair)[1]


def tied_seconds(payload: int, pair: Wire) -> float:
    """Seconds of the sum of a tied weight's gradient of `payload` bytes."""
    return collective_cost("all_reduce", payload, pair)[1]


def tied_sum(payload: int, pair: Wire) -> list[TrafficRow]:
    """The first and the last stage all-reduce the gradient of the weight that embedding and head share, once a step."""
    sent, seconds = collective_cost("all_reduce", payload, pair)
    return [TrafficRow("pp", "all_reduce", payload, 1, sent, pair.link, seconds, seconds)]
