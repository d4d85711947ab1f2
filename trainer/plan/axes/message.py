"""A message that a block's ops make on one axis, for one micro-batch."""

from __future__ import annotations

from typing import NamedTuple


class Talk(NamedTuple):
    """A verb on an axis of `payload` bytes: how often in forward and in backward, for one micro-batch of one block."""

    axis: str
    verb: str
    payload: int
    forward: int
    backward: int
