"""The computations and messages of each stage of a plain schedule, in an order that blocking sends cannot deadlock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from .schedules import Action

RELATIVE_SECONDS = {"F": 1, "B": 2}  # of an action, in forwards


class StageEvent(NamedTuple):
    """A computation of a micro-batch, or one end of a message: activations to the next stage (F), gradients to the one before (B)."""

    verb: Literal["compute", "send", "receive"]
    kind: Literal["F", "B"]
    micro: int


@lru_cache(maxsize=16)
def stage_events(actions: Callable[[int, int, int, int], list[Action]], stages: int, micros: int) -> tuple[tuple[StageEvent, ...], ...]:
    """The events of every stage, from the actions of a schedule of forwards (F) and backwards (B).

    A stage receives right before it computes, and its sender sends at that moment. All stages follow one global order of messages, so
    no two of them wait for each other even where a send blocks until it is received. Raises ValueError where a stage waits for ever.
    """
    step = _Step([deque(actions(stage, stages, micros, 1)) for stage in range(stages)])
    for stage in range(stages):
        step.enqueue(stage)
    while step.ready:
        step.run_next()
    if any(step.waiting):
        raise ValueError("a stage of this schedule waits for ever: its actions need a result that no earlier action makes")
    return tuple(map(tuple, step.events))


class _Step:
    """One optimizer step, simulated with equal stages and messages that take no time."""

    def __init__(self, waiting: list[deque[Action]]) -> None:
        self.waiting = waiting  # the actions that each stage has not started
        self.events: list[list[StageEvent]] = [[] for _ in waiting]
        self.ready: list[tuple[int, int]] = []  # (when a stage can start its next action, the stage)
        self._queued: set[int] = set()
        self._free = [0] * len(waiting)
        self._ended: dict[tuple[str, int, int], int] = {}  # (kind, micro-batch, stage) of what was computed -> when it ended

    def enqueue(self, stage: int) -> None:
        """Queue a stage whose next action has its input."""
        if stage in self._queued or not self.waiting[stage]:
            return
        sender, action = self._sender(stage), self.waiting[stage][0]
        received = 0 if sender is None else self._ended.get((action.kind, action.micro, sender))
        if received is not None:
            heappush(self.ready, (max(self._free[stage], received), stage))
            self._queued.add(stage)

    def run_next(self) -> None:
        """Run the action that can start first, with the message that it waits for."""
        start, stage = heappop(self.ready)
        self._queued.remove(stage)
        sender, (kind, micro, _) = self._sender(stage), self.waiting[stage].popleft()
        assert kind == "F" or kind == "B"
        if sender is not None:
            self.events[sender].append(StageEvent("send", kind, micro))
            self.events[stage].append(StageEvent("receive", kind, micro))
        self.events[stage].append(StageEvent("compute", kind, micro))
        self._free[stage] = self._ended[kind, micro, stage] = start + RELATIVE_SECONDS[kind]
        for neighbour in range(max(0, stage - 1), min(len(self.waiting), stage + 2)):
            self.enqueue(neighbour)

    def _sender(self, stage: int) -> int | None:
        """The stage that sends the input of a stage's next action; None: the input is the rank's own data."""
        sender = stage - 1 if self.waiting[stage][0].kind == "F" else stage + 1
        return sender if 0 <= sender < len(self.waiting) else None
