"""What a stage holds at once under a schedule that computes weights' gradients apart (arXiv:2401.10241 section 2)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .schedules import Schedule, part_of

STEADY = 4  # times the stages: a step of more micro-batches holds no more, unless its actions are listed


class HeldPasses(NamedTuple):
    """Micro-batches that a stage holds at one time, a chunk being a part of one: those between forward and backward, whose activations are
    saved, and those between the inputs' gradients and the weights', whose products are deferred. Of both the whole micro-batches of
    the part with the head."""

    saved: float
    deferred: float
    saved_in_head: int
    deferred_in_head: int


@lru_cache(maxsize=1 << 14)
def held_passes(schedule: Schedule, stage: int, stages: int, micros: int, chunks: int) -> tuple[HeldPasses, ...]:
    """Return what a stage of `chunks` parts holds after each of its actions: the states of which no other has at least as much of each."""
    parts, most = schedule.parts(chunks), min(micros, STEADY * stages)
    counts, found = [0, 0, 0, 0], set[tuple[int, ...]]()
    for kind, _, chunk in schedule.actions(stage, stages, micros if schedule.simulated else most, chunks):
        in_head = part_of(stage, chunk, stages, folded=schedule.folded) == parts * stages - 1
        saved, deferred = (kind == "F") - (kind in "BI"), (kind == "I") - (kind == "W")
        counts = [counts[0] + saved, counts[1] + deferred, counts[2] + saved * in_head, counts[3] + deferred * in_head]
        found.add(tuple(counts))
    largest: list[tuple[int, ...]] = []
    for each in sorted(found, reverse=True):  # what has as much of each as another comes before it
        if not any(each[1] <= other[1] and each[2] <= other[2] and each[3] <= other[3] for other in largest):
            largest.append(each)
    return tuple([HeldPasses(saved / parts, deferred / parts, *of_head) for saved, deferred, *of_head in reversed(largest)])
