"""Random legal lists of actions: every valid order of forwards, backwards and weight gradients of a pipeline."""

from __future__ import annotations

from random import Random

from distrain.trainer.plan.layout.schedules import Action, Kind, part_of

KINDS: tuple[tuple[Kind, ...], ...] = (("F", "B"), ("F", "I", "W"))


def random_actions(seed: int, stages: int, micros: int, chunks: int, *, folded: bool) -> list[list[Action]]:
    """Return each stage's actions, taken at random from those that can start, with whole and split backwards mixed."""
    draw, last = Random(seed), stages * chunks - 1
    left = [
        (stage, Action(kind, micro, chunk))
        for stage in range(stages)
        for chunk in range(chunks)
        for micro in range(micros)
        for kind in draw.choice(KINDS)
    ]
    lists: list[list[Action]] = [[] for _ in range(stages)]
    ran: set[tuple[str, int, int]] = set()
    while left:
        ready = []
        for at, (stage, (kind, micro, chunk)) in enumerate(left):
            part = part_of(stage, chunk, stages, folded=folded)
            forward, behind = ("F", micro, part) in ran, part == last or ("B", micro, part + 1) in ran
            can_start = {"F": part == 0 or ("F", micro, part - 1) in ran, "W": ("B", micro, part) in ran}
            if can_start.get(kind, forward and behind):
                ready.append((at, part))
        at, part = draw.choice(ready)
        stage, action = left.pop(at)
        lists[stage].append(action)
        ran.add((action.kind.replace("I", "B"), action.micro, part))
    return lists
