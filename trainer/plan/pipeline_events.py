"""The computations and messages of each stage of a plain schedule, in an order that blocking sends cannot deadlock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from .schedules import Action

SECONDS = {"F": 1, "B": 2}  # of an action, in forwards


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
    waiting = [deque(actions(stage, stages, micros, 1)) for stage in range(stages)]
    events: list[list[StageEvent]] = [[] for _ in range(stages)]
    computed: dict[tuple[str, int, int], int] = {}  # (kind, micro-batch, stage) -> when it ended
    free = [0] * stages
    ready: list[tuple[int, int]] = []  # (when its next action can start, stage)
    queued = [False] * stages

    def source(stage: int) -> int | None:
        """The stage that the next action of this one receives from; None: it computes on the rank's own data."""
        sender = stage - 1 if waiting[stage][0].kind == "F" else stage + 1
        return sender if 0 <= sender < stages else None

    def enqueue(stage: int) -> None:
        if queued[stage] or not waiting[stage]:
            return
        sender, action = source(stage), waiting[stage][0]
        needed = (action.kind, action.micro, stage if sender is None else sender)
        if sender is None or needed in computed:
            heappush(ready, (max(free[stage], computed.get(needed, 0)), stage))
            queued[stage] = True

    for stage in range(stages):
        enqueue(stage)
    while ready:
        start, stage = heappop(ready)
        queued[stage] = False
        sender, (kind, micro, _) = source(stage), waiting[stage].popleft()
        assert kind != "W"
        if sender is not None:
            events[sender].append(StageEvent("send", kind, micro))
            events[stage].append(StageEvent("receive", kind, micro))
        events[stage].append(StageEvent("compute", kind, micro))
        free[stage] = computed[kind, micro, stage] = start + SECONDS[kind]
        for neighbour in (stage - 1, stage, stage + 1):
            if 0 <= neighbour < stages:
                enqueue(neighbour)
    if any(waiting):
        raise ValueError("a stage of this schedule waits for ever: its actions need a result that no earlier action makes")
    return tuple(map(tuple, events))
