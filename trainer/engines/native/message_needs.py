"""Which of a stage's own actions the messages that it receives depend on."""

from __future__ import annotations

from collections.abc import Sequence

from ...plan.layout.schedules import Action
from .stage_chain import MessageKey, StageChain


def own_actions_needed(stage: int, actions: Sequence[Sequence[Action]], chain: StageChain) -> dict[MessageKey, int]:
    """Return how many of its own actions a stage must have run before each message of a step's lists can be made.

    A message that is made without this stage needs 0, and one that no list makes is not among them: a step before made it. Lists that
    cannot run give the messages that can be made.
    """
    made: dict[MessageKey, int] = {}
    needs = [0] * chain.stages  # of what each stage has run so far
    position = [0] * chain.stages
    listed = {key for each, own in enumerate(actions) for action in own if (key := chain.made_by(each, action))}
    waiting: dict[MessageKey, int] = {}  # what a stage waits for, and the stage
    running = list(range(chain.stages))
    while running:
        at = running.pop()
        while position[at] < len(actions[at]):
            action = actions[at][position[at]]
            taken = chain.taken_by(at, action)
            if taken in listed and taken not in made:
                waiting[taken] = at
                break
            position[at] += 1
            needs[at] = position[at] if at == stage else max(needs[at], made.get(taken, 0) if taken else 0)
            key = chain.made_by(at, action)
            if key:
                made[key] = needs[at]
                if key in waiting:
                    running.append(waiting.pop(key))
    return made
