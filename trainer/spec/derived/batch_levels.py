"""The levels of the batch of a run that ramps it up (rampup.py), and the steps that each level has."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import ceil, gcd
from typing import NamedTuple

from ..run import Run, Train
from ..sections.rampup import Rampup

MOST_LEVELS = 10_000  # of a run


class Level(NamedTuple):
    """Sequences of a step, while fewer than `until` tokens are trained on; None: to the end of the run."""

    batch: int
    until: int | None


class LevelSteps(NamedTuple):
    """The steps of a level in a row: sequences of each, and how many steps, samples and tokens come before the first of them."""

    batch: int
    steps: int
    samples: int
    tokens: int


class LevelOfRun(NamedTuple):
    """How many steps of a run train a batch of so many sequences."""

    batch: int
    steps: int


def is_valid_rampup(train: Train) -> bool:
    """Return whether train.rampup names levels: an end for each batch, both rising, increments that divide what the batch rises by, at most
    MOST_LEVELS levels; so it is without a ramp-up."""
    rampup = train.rampup
    rises = [later - earlier for earlier, later in pairwise((*rampup.batches, train.batch))]
    return (
        len(rampup.batches) == len(rampup.ends)
        and all(later > earlier for earlier, later in pairwise(rampup.ends))
        and all(rise > 0 and not (rampup.by and rise % rampup.by) for rise in rises)
        and (not rampup.by or sum(rises) // rampup.by <= MOST_LEVELS)
    )


@lru_cache(maxsize=64)
def levels(train: Train) -> tuple[Level, ...]:
    """Return the levels of the batch, in order, the last one train.batch, which is alone where train.rampup breaks its rule
    (trainer/plan/rules/rampup_rules.py)."""
    rampup, found, began = train.rampup, list[Level](), Fraction(0)
    if not is_valid_rampup(train):
        return (Level(train.batch, None),)
    for (batch, following), end in zip(pairwise((*rampup.batches, train.batch)), rampup.ends, strict=True):
        many, until = (following - batch) // rampup.by if rampup.by else 1, Fraction(end)
        for number in range(many):
            ends = began + (until - began) * (number + 1) / many
            found.append(Level(batch + number * (rampup.by or 0), ceil(ends)))
        began = until
    return (*found, Level(train.batch, None))


def batches_of_levels(train: Train) -> tuple[int, ...]:
    """Return the sequences of a step on each level."""
    return tuple([each.batch for each in levels(train)])


def common_divisor(train: Train) -> int:
    """Return the largest number that divides the batch of every level: train.batch without a ramp-up."""
    return gcd(*batches_of_levels(train))


@lru_cache(maxsize=64)
def steps_of_levels(train: Train, tokens: int = 0) -> tuple[LevelSteps, ...]:
    """Return the levels of a run that has trained on so many tokens, from there on; a level that no step begins in is left out.

    The batch of a step follows from the tokens trained on before it, and so from the samples consumed, never from the layout.
    """
    found, steps, samples, trained = list[LevelSteps](), 0, 0, 0
    for batch, until in levels(train):
        if until is not None and tokens + trained >= until:
            continue
        found.append(LevelSteps(batch, steps, samples, trained))
        if until is not None:
            many = -(-(until - tokens - trained) // (batch * train.seq))
            steps, samples, trained = steps + many, samples + many * batch, trained + many * batch * train.seq
    return tuple(found)


def level_of_step(train: Train, step: int, tokens: int = 0) -> LevelSteps:
    """Return the level of a step, from 0, of a run that has trained on so many tokens before its step 0."""
    begun = steps_of_levels(train, tokens)
    return begun[bisect_right(begun, step, key=lambda each: each.steps) - 1]


def samples_before(train: Train, step: int, tokens: int = 0) -> int:
    """Return the samples that a run trains in the steps before a step, from 0."""
    level = level_of_step(train, step, tokens)
    return level.samples + (step - level.steps) * level.batch


def steps_until(train: Train, wanted: float, tokens: int = 0) -> int:
    """Return the steps in which a run that has trained on so many tokens trains on `wanted` tokens more, rounded up to whole steps."""
    level = next((each for each in reversed(steps_of_levels(train, tokens)) if each.tokens < wanted), steps_of_levels(train, tokens)[0])
    return level.steps + max(0, ceil((wanted - level.tokens) / (level.batch * train.seq)))


def run_steps(train: Train) -> int:
    """Return the steps of a whole run: train.steps, or those that reach train.tokens."""
    return train.steps or steps_until(train, train.tokens or 0)


def levels_of_run(train: Train) -> tuple[LevelOfRun, ...]:
    """Return how many of a whole run's steps train each batch, in order; a batch that no step has is left out."""
    last, begun = run_steps(train), steps_of_levels(train)
    ends = (*[each.steps for each in begun[1:]], last)
    return tuple([LevelOfRun(each.batch, min(end, last) - each.steps) for each, end in zip(begun, ends, strict=True) if each.steps < last])


def run_at_batch(run: Run, batch: int) -> Run:
    """Return the run with a batch of so many sequences at every step: what a step of a level costs and sends is that of its steps."""
    if run.train.batch == batch and not run.train.rampup.batches:
        return run
    return replace(run, train=replace(run.train, batch=batch, rampup=Rampup()))
