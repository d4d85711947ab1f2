"""What a rank did in a step, as it was timed; seconds are on one clock that all ranks share."""

from __future__ import annotations

from typing import NamedTuple

NONE = -1  # the micro-batch and the part of a span that belongs to none
PASSES = ("F", "B", "I", "W")


class TimedSpan(NamedTuple):
    """What a rank did from `start` to `end`: a pass (F, B, or a backward in two, I and W) of a micro-batch through a part of the model;
    reading it (data); receiving or sending hidden states or their gradients; a sum of gradients; that of a tied weight's over both ends
    (tied); a message of all ranks, which agree on the norm or the loss (sync); the optimizer's step."""

    kind: str
    micro: int
    part: int
    start: float
    end: float

    @property
    def is_pass(self) -> bool:
        """Whether it is a pass of a micro-batch."""
        return self.kind in PASSES


class TimedStep(NamedTuple):
    """One step of a rank: its number from 1, when it began and ended, the processor seconds that its process took, its spans in order."""

    step: int
    start: float
    end: float
    cpu: float
    spans: tuple[TimedSpan, ...]
