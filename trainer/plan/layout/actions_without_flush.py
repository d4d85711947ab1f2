"""The actions of a pipeline without a flush: a step goes on where the one before stopped. Micro-batches are numbered from a flush on."""

from __future__ import annotations

from .schedules import Action


def step_actions(stage: int, stages: int, first: int, end: int) -> list[Action]:
    """1F1B without a flush: the forwards of the micro-batches `first` <= micro < `end`, each with the backward that it makes room for."""
    warm, actions = stages - 1 - stage, list[Action]()
    for micro in range(first, end):
        actions.append(Action("F", micro))
        if micro >= warm:
            actions.append(Action("B", micro - warm))
    return actions


def flush_actions(stage: int, stages: int, end: int) -> list[Action]:
    """The backwards that are left where `end` micro-batches have begun."""
    return [Action("B", micro) for micro in range(max(0, end - (stages - 1 - stage)), end)]
