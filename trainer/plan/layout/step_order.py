"""One step's actions in an order in which they can run: the seconds of a schedule's step under many durations, without its events.

`simulate` tells when each action runs; a search needs the length of the step alone, for thousands of layouts of a few schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from .schedules import Schedule, part_of
from .simulate import TimedAction, simulate

NOTHING = -1  # in place of an action that another one waits for: it has ended at 0


class OrderedAction(NamedTuple):
    """An action in such an order: its duration's number, and the actions (by their place in the order) after which it starts: the one
    before it on its stage, and the one whose result it takes, which another stage may have sent."""

    duration: int
    before: int
    needs: int
    is_sent: bool


class StepOrder:
    """The actions of all stages, what each duration is of (a kind of action on a part of the model), and each stage's last action."""

    def __init__(self, steps: tuple[OrderedAction, ...], durations: tuple[tuple[str, int], ...], last: tuple[int, ...]) -> None:
        self.steps, self.durations, self.last = steps, durations, last
        self._last_end = lru_cache(maxsize=64)(lambda *given: max(self.ends(*given)))  # layouts with equal passes ask again

    def seconds(self, each: Callable[[str, int], float], send: float) -> float:
        """The seconds of the step, as `simulate` has them, of actions that take `each(kind, part)` seconds."""
        return self._last_end(tuple([each(*key) for key in self.durations]), send)

    def ends(self, durations: Sequence[float], send: float) -> list[float]:
        """When each action ends, in their order; at last 0, for NOTHING."""
        return self.ends_of_actions([durations[step.duration] for step in self.steps], send)

    def ends_of_actions(self, seconds: Sequence[float], send: float) -> list[float]:
        """When each action ends, if each takes its own `seconds`."""
        ends = [0.0] * (len(self.steps) + 1)
        for at, (_, before, needs, is_sent) in enumerate(self.steps):
            start = ends[before]
            if is_sent:  # a result of its own stage is there already
                arrived = ends[needs] + send
                if arrived > start:
                    start = arrived
            ends[at] = start + seconds[at]
        return ends


@lru_cache(maxsize=512)
def step_order(schedule: Schedule, stages: int, micros: int, chunks: int) -> StepOrder:
    """The order of a schedule's step."""
    actions = [schedule.actions(stage, stages, micros, chunks) for stage in range(stages)]
    step = simulate(actions, folded=schedule.folded, seconds=lambda kind, part: 1.0)
    # Of actions that take a second each, those that end before another one starts come before it.
    events = sorted((event for each in step.events for event in each), key=lambda event: event.start)
    durations: dict[tuple[str, int], int] = {}
    last, of_result = [NOTHING] * stages, dict[tuple[bool, int, int], int]()  # the last action of each stage; results by their action
    steps: list[OrderedAction] = []
    for at, event in enumerate(events):
        part = _part(event, stages, schedule.folded)
        kind, micro, _ = event.action
        needs = NOTHING
        if kind != "W":
            needs = of_result.get((kind == "F", micro, part - 1 if kind == "F" else part + 1), NOTHING)
        is_sent = needs >= 0 and events[needs].stage != event.stage
        steps.append(OrderedAction(durations.setdefault((kind, part), len(durations)), last[event.stage], needs, is_sent))
        last[event.stage] = at
        if kind != "W":
            of_result[kind == "F", micro, part] = at
    return StepOrder(tuple(steps), tuple(durations), tuple(last))


def _part(event: TimedAction, stages: int, folded: bool) -> int:
    return part_of(event.stage, event.action.chunk, stages, folded=folded)
