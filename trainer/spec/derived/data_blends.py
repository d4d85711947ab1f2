"""The blends of sources that a run reads one after another: one by data.weights, or one a stage of data.stages."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import ceil, inf
from typing import NamedTuple

from ..numbers.bounded import MOST
from ..run import Data

ALONE = (1.0,)  # the weights of one source


class Blend(NamedTuple):
    """The weights of all sources while fewer than `until` tokens of the run are read; None: to its end."""

    weights: tuple[float, ...]
    until: float | None


class SampleBlend(NamedTuple):
    """The weights of all sources from sample number `first` of the run on."""

    first: int
    weights: tuple[float, ...]


def blends(data: Data) -> tuple[Blend, ...]:
    """Return the blends in order: at least one."""
    if data.stages:
        return tuple([Blend(each.weights, each.until) for each in data.stages])
    return (Blend(data.weights or ALONE, None),)


def has_sources(data: Data) -> bool:
    """Return whether each path is a source with a weight; otherwise all paths are one text."""
    return bool(data.weights or data.stages)


def sample_blends(found: Sequence[Blend], seq: int) -> tuple[SampleBlend, ...]:
    """Return the blends by the sample of `seq` tokens that each begins with: the first of which no token lies before the stage.

    The sample alone decides, so that a global batch follows from the samples consumed, never from the layout.
    """
    ends = [min(ceil(Fraction(each.until) / seq), MOST) for each in found if each.until is not None]
    return tuple([SampleBlend(first, each.weights) for first, each in zip((0, *ends), found, strict=False)])


def blends_before(data: Data, seq: int, samples: int) -> tuple[SampleBlend, ...]:
    """Return the blends of a run's first samples: what two runs have in common that have read the same ones so far."""
    begun = sample_blends(blends(data), seq)
    ends = [*(each.first for each in begun[1:]), inf]
    return tuple([each for each, end in zip(begun, ends, strict=True) if each.first < min(end, samples)])


def tokens_of_sources(data: Data, tokens: float) -> list[float]:
    """Return how many of a run's first tokens are read from each source, by the weights of each stage."""
    read = [0.0] * len(blends(data)[0].weights)
    for many, weights in tokens_of_stages(data, tokens):
        for source, weight in enumerate(weights):
            read[source] += many * weight / sum(weights)
    return read


def tokens_of_stages(data: Data, tokens: float) -> list[tuple[float, tuple[float, ...]]]:
    """Return the tokens of a run of so many that are read in each stage, and its weights; without stages that it does not begin."""
    found = blends(data)
    bounds = [0.0, *(min(each.until or inf, tokens) for each in found[:-1]), tokens]
    return [(end - begin, each.weights) for (begin, end), each in zip(pairwise(bounds), found, strict=True) if begin < end]
