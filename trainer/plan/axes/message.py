"""A message of a block's ops on one axis, for one micro-batch."""

from __future__ import annotations

from typing import NamedTuple


class AxisMessage(NamedTuple):
    """A collective of `payload` bytes on an axis: how often in forward and in backward, for one micro-batch of one block."""

    axis: str
    verb: str
    payload: int
    forward: int
    backward: int
