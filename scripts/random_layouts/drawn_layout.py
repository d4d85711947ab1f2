"""A random layout of a few ranks, by the fields of `ProveLayout`."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from types import NoneType
from typing import Any, get_args, get_type_hints

from ...trainer.plan.axes import AXES
from ...trainer.prove.trials.layouts import FILE_SCHEDULE, PROVED_AXES, PROVED_SCHEDULES, ZERO_STAGES, ProveLayout
from ...trainer.spec.numbers.divisors import divisors
from .drawn_values import drawn_value

RANKS = (2,) * 5 + (3,) + (4,) * 5 + (6, 8)
RARE = 0.12  # share of the draws that set a field which only some users write
GUIDED = 0.75  # share of the layouts whose fields of that kind have an effect beside the others; most of the rest are refused
WITH_RARE = 0.6  # share of these that have one
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
    if random.random() < GUIDED:
        if random.random() < WITH_RARE and (choices := _effective_values(values, random)):
            values |= random.choice(choices)
        return ProveLayout(**values)
    for name, hint in get_type_hints(ProveLayout).items():
        if name not in DRAWN_APART and random.random() < RARE:
            values[name] = _rare_value(hint, random)
    return ProveLayout(**values)


def _effective_values(values: Mapping[str, Any], random: Random) -> list[dict[str, Any]]:
    """Values of a field that only some users write, one for each field that has an effect beside `values`, with the ZeRO stage it needs."""
    dp, zero, summed = values["dp"], values["zero"], values["dp"] * values["cp"] > 1
    rows: tuple[tuple[bool, dict[str, Any]], ...] = (
        (summed, {"compress": random.choice((1, 2, 4)), "zero": 0}),
        (dp > 1, {"sync": random.choice((2, 3))}),
        (summed, {"stale": 1, "zero": min(zero, 1)}),
        (dp > 1, {"servers": random.randint(1, dp), "zero": 0}),
        (dp > 1, {"hierarchical": True, "zero": 0}),
        (summed, {"offload": "optimizer", "zero": max(zero, 1)}),
        (summed, {"offload": "all", "zero": 3}),
        (dp > 2, {"shard": 2, "zero": max(zero, 1)}),
        (summed, {"gather": random.choice(("step", "micro")), "zero": 3}),
        (values["cp"] > 1, {"all_to_all": True}),
        (values["pp"] > 1, {"schedule": "interleaved", "chunks": random.choice((2, 3))}),
    )
    return [row for has_effect, row in rows if has_effect]


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
