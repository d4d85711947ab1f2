"""A random layout of a few ranks, by the fields of `ProveLayout`."""

from __future__ import annotations

from random import Random
from types import NoneType
from typing import Any, get_args, get_type_hints

from ...trainer.plan.axes import AXES
from ...trainer.prove.trials.layouts import FILE_SCHEDULE, PROVED_AXES, PROVED_SCHEDULES, ZERO_STAGES, ProveLayout
from ...trainer.spec.numbers.divisors import divisors
from .drawn_values import drawn_value

RANKS = (2,) * 5 + (3,) + (4,) * 5 + (6, 8)
RARE = 0.12  # share of the draws that set a field which only some users write
COUNTS = (1, 2, 2, 3, 4)  # that a field with a number takes
DRAWN_APART = (*PROVED_AXES, "zero", "sequence", "schedule", "stages", "engine", "recompute")


def draw_layout(random: Random, layers: int) -> ProveLayout:
    """Draw a layout of a model of so many layers, which may be illegal."""
    values = _degrees(random, random.choice(RANKS))
    values["zero"] = random.choice(ZERO_STAGES)
    values["sequence"] = values["tp"] > 1 and random.random() < 0.5
    values["engine"] = random.choice(("auto", "native"))
    if random.random() < 2 * RARE:
        values["recompute"] = random.choice(("selective", "full"))
    if values["pp"] > 1:
        values["schedule"] = random.choice([each for each in PROVED_SCHEDULES if each != FILE_SCHEDULE])
        if random.random() < RARE:
            values["stages"] = _shares(random, layers, values["pp"])
    for name, hint in get_type_hints(ProveLayout).items():
        if name not in DRAWN_APART and random.random() < RARE:
            values[name] = _rare_value(hint, random)
    return ProveLayout(**values)


def _rare_value(hint: Any, random: Random) -> Any:
    kinds = [each for each in get_args(hint) if each is not NoneType] or [hint]
    if kinds == [int]:
        return random.choice(COUNTS)
    return True if kinds == [bool] else drawn_value(kinds[0], None, random)


def _degrees(random: Random, ranks: int) -> dict[str, Any]:
    """The degrees of all axes: ranks shared out over them, and a divisor of the degree of the axis that each inner one is part of."""
    degrees: dict[str, Any] = dict.fromkeys(PROVED_AXES, 1)
    outer = [axis for axis in PROVED_AXES if AXES[axis].within is None]
    for prime in _primes(ranks):
        degrees[random.choice(outer)] *= prime
    for axis in PROVED_AXES:
        if (within := AXES[axis].within) is not None and random.random() < 0.5:
            degrees[axis] = random.choice(list(divisors(degrees[within])))
    return degrees


def _primes(number: int) -> list[int]:
    found, each = list[int](), 2
    while number > 1:
        while number % each == 0:
            found.append(each)
            number //= each
        each += 1
    return found


def _shares(random: Random, layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, at least one where they are enough."""
    if layers < stages:
        return (1,) * stages
    cuts = sorted(random.sample(range(1, layers), stages - 1))
    return tuple(after - before for before, after in zip((0, *cuts), (*cuts, layers), strict=True))
