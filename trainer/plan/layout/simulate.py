"""The time of one step of any lists of actions: when each stage runs each of them, how long it waits and what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .schedules import Action, part_of, peak_in_flight, stage_and_chunk

# kind -> the one that a stage runs right before it for the same part and micro-batch
PRECEDING_KIND = {"F": None, "B": "F", "I": "F", "W": "I"}
# the last kind that a stage runs -> the actions that are missing after it
MISSING_ACTIONS = {None: "{part}F{micro}", "F": "{part}B{micro}, or {part}I{micro} and {part}W{micro}", "I": "{part}W{micro}"}

Lists = Sequence[Sequence[Action]]  # the actions of each stage in order
Result = tuple[bool, int, int]  # whether of a forward, the micro-batch, the part


class ActionsError(ValueError):
    """Lists of actions that cannot run; `at` is where on the stage's list, None where the action is missing."""

    def __init__(self, stage: int, at: int | None, says: str) -> None:
        super().__init__(f"stage {stage} {says}")
        self.stage, self.at = stage, at


class TimedAction(NamedTuple):
    """A stage's action with the seconds, from the step's begin, at which it starts and ends."""

    stage: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One simulated step."""

    events: tuple[tuple[TimedAction, ...], ...]  # of each stage in order
    seconds: float
    idle: tuple[float, ...]  # the share of the step that each stage waits
    peak: tuple[float, ...]  # the most micro-batches that each stage holds at once


Seconds = Callable[[str, int], float]  # of a kind of action on a part of the model
Measured = Mapping[tuple[str, int, int], float]  # seconds of a kind of action on a part, for a micro-batch


def simulate(
    actions: Lists, *, folded: bool, seconds: Seconds | Measured, send: float = 0.0, afterwards: Measured | None = None
) -> Simulation:
    """One step of any legal lists of actions, one a stage, each of which takes its `seconds`.

    An action starts when its stage is free and its input is there: a forward's, `send` seconds after the forward of the part before
    it on another stage; a backward's, in the same way, after the backward of the part behind it. `afterwards` are the seconds for which an
    action keeps its stage from the next one once its result is there. Raises ActionsError, a ValueError.
    """
    check_actions(actions, folded=folded)
    step = _SimulatedStep(actions, folded, seconds, send, afterwards or {})
    step.run()
    total = max(events[-1].end for events in step.events)
    busy = [sum(event.end - event.start for event in events) for events in step.events]
    return Simulation(
        events=tuple(map(tuple, step.events)),
        seconds=total,
        idle=tuple(1 - each / total if total else 0.0 for each in busy),
        peak=tuple(peak_in_flight(each, step.chunks) for each in actions),
    )


def check_actions(actions: Lists, *, folded: bool) -> None:
    """Raises ActionsError, a ValueError, unless each stage runs every micro-batch on each of its chunks, forward and then backward.

    It names an action as `1F3`: the part of the model, the kind, the micro-batch.
    """
    for stage, each in enumerate(actions):
        if not each:
            raise ActionsError(stage, None, "has no actions")
    chunks, micros = _shape(actions, folded)
    for stage, each in enumerate(actions):
        _check_stage(stage, each, [part_of(stage, chunk, len(actions), folded=folded) for chunk in range(chunks)], micros)


def _shape(actions: Lists, folded: bool) -> tuple[int, int]:
    """Chunks of a stage, and micro-batches."""
    if not actions:
        raise ValueError("there are no lists of actions: write one for each stage")
    chunks = 2 if folded else 1 + max(action.chunk for each in actions for action in each)
    return chunks, 1 + max(action.micro for each in actions for action in each)


def _check_stage(stage: int, actions: Sequence[Action], parts: Sequence[int], micros: int) -> None:
    """Raises ActionsError unless each micro-batch has one F and then one B, or an I and later a W, on each part of the stage."""
    ran: dict[tuple[int, int], str] = {}  # (micro-batch, chunk) -> the last kind
    for at, (kind, micro, chunk) in enumerate(actions):
        if kind not in PRECEDING_KIND or micro < 0 or not 0 <= chunk < len(parts):
            says = f"has the action {kind!r} of micro-batch {micro} on chunk {chunk}"
            raise ActionsError(stage, at, f"{says}: it is F, B, I or W, of micro-batch 0 or later, on one of its {len(parts)} chunks")
        last = ran.get((micro, chunk))
        if last != PRECEDING_KIND[kind]:
            raise ActionsError(stage, at, _out_of_order(kind, last, parts[chunk], micro))
        ran[micro, chunk] = kind
    for micro, chunk in ((micro, chunk) for micro in range(micros) for chunk in range(len(parts))):
        last = ran.get((micro, chunk))
        if last in MISSING_ACTIONS:
            says = f"never runs {MISSING_ACTIONS[last].format(part=parts[chunk], micro=micro)}"
            raise ActionsError(stage, None, f"{says}: every part of the model runs all the micro-batches from 0 to {micros - 1}")


def _out_of_order(kind: str, last: str | None, part: int, micro: int) -> str:
    """What is wrong with an action after the last one of the same part and micro-batch."""
    needed, name = PRECEDING_KIND[kind], f"{part}{kind}{micro}"
    if kind == last:
        return f"runs {name} twice: remove one of them"
    if needed and (last is None or PRECEDING_KIND[needed] == last):
        return f"runs {name} before {part}{needed}{micro}: move it behind"
    return f"runs {name} after {part}{last}{micro}: a micro-batch has one F and one B on a part, or one F, one I and one W"


class _SimulatedStep:
    """One optimizer step of legal lists of actions."""

    def __init__(self, actions: Lists, folded: bool, seconds: Seconds | Measured, send: float, afterwards: Measured) -> None:
        self.actions = actions
        self.chunks, micros = _shape(actions, folded)
        self.events: list[list[TimedAction]] = [[] for _ in actions]
        stages = len(actions)
        self._last = stages * self.chunks - 1
        self._stage_of = [stage_and_chunk(part, stages, folded=folded)[0] for part in range(self._last + 1)]
        self._parts = [[part_of(stage, chunk, stages, folded=folded) for chunk in range(self.chunks)] for stage in range(stages)]
        self._seconds = seconds if isinstance(seconds, Mapping) else _of_every_micro_batch(seconds, actions, self._last + 1, micros)
        self._send, self._afterwards = send, afterwards
        self._free = [0.0] * stages
        self._ended: dict[Result, float] = {}
        self._waits: dict[Result, int] = {}  # a result -> the stage that waits for it

    def run(self) -> None:
        """Run all actions. Raises ActionsError where stages wait for each other for ever."""
        ready = list(range(len(self.actions)))
        while ready:
            ready += self._advance(ready.pop())
        if self._waits:
            raise self._endless_wait()

    def _advance(self, stage: int) -> list[int]:
        """Run a stage up to an action whose input is not there yet; the stages that waited for what it computed."""
        events, actions, woken = self.events[stage], self.actions[stage], []
        free = self._free[stage]
        for at in range(len(events), len(actions)):
            action = actions[at]
            kind, micro, chunk = action
            part = self._parts[stage][chunk]
            start, needed = free, self._input_of(action, part)
            if needed:
                ended = self._ended.get(needed)
                if ended is None:
                    self._waits[needed] = stage
                    break
                start = max(free, ended + (self._send if self._stage_of[needed[2]] != stage else 0.0))
            end = start + self._seconds[kind, part, micro]
            free = self._free[stage] = end + self._afterwards.get((kind, part, micro), 0.0)
            events.append(TimedAction(stage, action, start, end))
            if kind != "W":
                result = (kind == "F", micro, part)
                self._ended[result] = end
                if result in self._waits:
                    woken.append(self._waits.pop(result))
        return woken

    def _input_of(self, action: Action, part: int) -> Result | None:
        """The result of another part that an action starts from; its own part's are there, for the lists are legal."""
        if action.kind == "F":
            return (True, action.micro, part - 1) if part else None
        return (False, action.micro, part + 1) if action.kind != "W" and part < self._last else None

    def _endless_wait(self) -> ActionsError:
        """Names a stage whose input comes later on the list of a stage that waits too."""
        stage, cycle = min(self._waits.values()), list[int]()
        while stage not in cycle:
            cycle.append(stage)
            stage = self._sender(stage)
        cycle = sorted(cycle[cycle.index(stage) :])
        stage = next(each for each in cycle if self._waiting(each)[2] != self._waiting(self._sender(each))[1])
        (name, _, (is_forward, micro, part)), sender = self._waiting(stage), self._sender(stage)
        needs = f"it needs the {'forward' if is_forward else 'backward'} of micro-batch {micro} on part {part}"
        behind = f"which stage {sender} runs only after {self._waiting(sender)[0]}"
        return ActionsError(stage, len(self.events[stage]), f"waits for ever to run {name}: {needs}, {behind}")

    def _waiting(self, stage: int) -> tuple[str, Result, Result]:
        """The action that a waiting stage cannot start, its result, and the result that it needs."""
        action = self.actions[stage][len(self.events[stage])]
        part = self._parts[stage][action.chunk]
        needed = self._input_of(action, part)
        assert needed
        return f"{part}{action.kind}{action.micro}", (action.kind == "F", action.micro, part), needed

    def _sender(self, stage: int) -> int:
        """The stage that a waiting stage waits for."""
        return self._stage_of[self._waiting(stage)[2][2]]


def _of_every_micro_batch(seconds: Seconds, actions: Lists, parts: int, micros: int) -> Measured:
    known = {(kind, part): seconds(kind, part) for kind in _kinds(actions) for part in range(parts)}
    return {(*key, micro): each for key, each in known.items() for micro in range(micros)}


def _kinds(actions: Lists) -> set[str]:
    return {action.kind for each in actions for action in each}
