"""The events of one step, in seconds from its start, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..layout.schedules import Kind
from .timed_spans import NONE

SpanKind = Literal["F", "B", "I", "W", "send", "sum", "tied", "step", "gather", "host", "data", "other"]
PASS_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


class StepSpan(NamedTuple):
    """What a stage does from `start` to `end`: a pass of a micro-batch through a part of the model (F, B, or a backward in two, I and W),
    the send of its result, or what follows the passes: the exposed sum of gradients, the sum of tied weights, the optimizer's step, the
    exposed gather of stepped weights, the host's work between steps; of a measured step also reading
    data, and what else the host does between actions (other). `messages` are the seconds of it in which it waits for messages.
    """

    stage: int
    kind: SpanKind
    start: float
    end: float
    messages: float = 0.0
    micro: int = NONE
    part: int = NONE

    @property
    def is_pass(self) -> bool:
        """Whether it is a pass of a micro-batch."""
        return self.kind in PASS_KINDS

    @property
    def has_micro_batch(self) -> bool:
        """Whether it belongs to a micro-batch: a pass, or the send of its result."""
        return self.part != NONE

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


class Transfer(NamedTuple):
    """Hidden states (F) or their gradients (B) of a micro-batch on their way to the part of the model `part` on another stage."""

    kind: Literal["F", "B"]
    micro: int
    part: int
    sender: int
    receiver: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class StageTimeline:
    """One pipeline stage's step. Its seconds add up to those of the step: `computing`, `messages` (in passes, sends and sums), `filling`
    (before its first span), `waiting` (between passes, for other stages) and `draining` (after its last pass, for the slowest stage)."""

    index: int
    parts: tuple[tuple[int, int], ...]  # (first, last + 1) layers of each part
    spans: tuple[StepSpan, ...]
    computing: float
    messages: float
    filling: float
    waiting: float
    draining: float
    in_flight: float  # micro-batches that it holds at once, at most
    held: int  # parts of micro-batches that it holds when the step starts: without a flush, those of the step before
    saved: float  # bytes of activations that one micro-batch holds on one of its parts

    def idle(self, seconds: float) -> float:
        """The share of a step of so many seconds in which it has nothing to do."""
        return max(0.0, self.filling + self.waiting + self.draining) / seconds if seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step: `seconds` as simulated, beside those `planned`. Without a flush it is a step between others, whose micro-batches are
    numbered from 0; those before are of the step before."""

    seconds: float
    planned: float
    schedule: str
    flushes: bool
    micros: int
    chunks: int
    stages: tuple[StageTimeline, ...]
    transfers: tuple[Transfer, ...]

    @property
    def passes(self) -> int:
        """Passes of all stages."""
        return sum(span.is_pass for stage in self.stages for span in stage.spans)


def held_activations(stage: StageTimeline) -> list[tuple[float, float]]:
    """(seconds, bytes of activations that a rank of the stage holds from then on): a forward adds a micro-batch's on a part, the end of
    its backward, or of its weights' gradients, frees them."""
    frees = "W" if any(span.kind == "W" for span in stage.spans) else "B"
    held, curve = stage.held, [(0.0, stage.held * stage.saved)]
    for span in stage.spans:  # in their order: a pass may start at the moment, to rounding, at which the one before ends
        if span.kind == "F":
            held += 1
            curve.append((span.start, held * stage.saved))
        elif span.kind in ("B", frees):
            held -= 1
            curve.append((span.end, held * stage.saved))
    return curve
