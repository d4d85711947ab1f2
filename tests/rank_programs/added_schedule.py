"""A pipeline schedule, added by its generator and its row alone."""

from __future__ import annotations

from distrain.trainer.plan.layout.schedules import Action, Schedule


def eager_1f1b(stage: int, stages: int, micros: int, chunks: int = 1) -> list[Action]:
    """1F1B with a warm-up of two forwards for each later stage."""
    warm = min(2 * (stages - stage - 1), micros)
    actions = [Action("F", micro) for micro in range(warm)]
    for micro in range(micros - warm):
        actions += [Action("F", warm + micro), Action("B", micro)]
    return actions + [Action("B", micro) for micro in range(micros - warm, micros)]


ROW = Schedule(actions=eager_1f1b, source="tests")
