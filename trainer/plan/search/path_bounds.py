"""Lower bounds of a step over all partitions of a model's layers, from paths through its actions.

Positions number the parts of the model stage by stage, in the order in which a search decides on their layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf
from typing import NamedTuple

from .step_paths import Path

ROUNDS = 60  # of the weights of a combined path
SHARPNESS = 40.0  # how quickly they follow the slowest path


class StageLimits(NamedTuple):
    """The fewest and the most layers of each stage, each with so many parts."""

    least: tuple[int, ...]
    most: tuple[int, ...]
    chunks: int
    layers: int  # of the model

    def admit_any(self) -> bool:
        """Whether there is a partition within them."""
        ordered = all(least <= most for least, most in zip(self.least, self.most, strict=True))
        return ordered and sum(self.least) <= self.layers <= sum(self.most)


def stage_limits(most: Sequence[int], chunks: int, layers: int) -> StageLimits:
    """The limits of stages with at most these layers: each has a layer a part, and what the others have no room for."""
    room = sum(most)
    return StageLimits(tuple([max(chunks, layers - (room - each)) for each in most]), tuple(most), chunks, layers)


class PathBound:
    """The least seconds of one path over all ways to go on from the first positions of a partition.

    Least(stage, layers) is the recursion min over t of seconds(stage, t) + Least(stage + 1, layers - t). A path being linear, its tables
    are filled from the cheapest layer on.
    """

    def __init__(self, path: Path, limits: StageLimits) -> None:
        """`path` has its seconds by position."""
        chunks, self.path = limits.chunks, path
        stages = [path.layer[at : at + chunks] for at in range(0, len(path.layer), chunks)]
        self.behind = [(sum(some[at + 1 :]), min(some[at + 1 :], default=0.0)) for some in stages for at in range(chunks)]
        """For each position: seconds of a layer on each later part of its stage, and of one on the cheapest of them."""
        self.tables: list[list[float]] = [[0.0, *[inf] * limits.layers]]
        spare: list[float] = []  # seconds of each further layer that the stages from here on may have
        fewest, seconds = 0, 0.0
        for some, least, most in list(zip(stages, limits.least, limits.most, strict=True))[::-1]:
            fewest, seconds = fewest + least, seconds + sum(some) + (least - chunks) * min(some)
            spare = sorted([*spare, *[min(some)] * (most - least)])
            table, spent = [inf] * (limits.layers + 1), seconds
            for layers, more in enumerate([0.0, *spare[: limits.layers - fewest]], fewest):
                spent += more
                table[layers] = spent
            self.tables.append(table)
        self.tables.reverse()

    def least(self) -> float:
        """The least seconds of the path."""
        return self.path.fixed + self.tables[0][-1]


def least_layers(path: Path, limits: StageLimits) -> list[int]:
    """The layers of each position with which a path is shortest."""
    chunks = limits.chunks
    cheapest = [min(range(at, at + chunks), key=path.layer.__getitem__) for at in range(0, len(path.layer), chunks)]
    layers = [1] * len(path.layer)
    left = limits.layers
    for at, least in zip(cheapest, limits.least, strict=True):
        layers[at] += least - chunks
        left -= least
    for stage in sorted(range(len(cheapest)), key=lambda each: path.layer[cheapest[each]]):
        more = min(left, limits.most[stage] - limits.least[stage])
        layers[cheapest[stage]] += more
        left -= more
    return layers


def combined_path(paths: Sequence[Path], limits: StageLimits) -> Path:
    """A weighted mean of paths whose least seconds are large: no step is shorter than its longest path, nor than a mean of them.

    The weights follow the slowest path of the partition that is the best for them (multiplicative weights, doi:10.4086/toc.2012.v008a006).
    """
    weights, best, most = [1.0 / len(paths)] * len(paths), paths[0], -inf
    for _ in range(ROUNDS):
        mean = _mean(paths, weights)
        layers = least_layers(mean, limits)
        if (seconds := mean.seconds(layers)) > most:
            best, most = mean, seconds
        each = [path.seconds(layers) for path in paths]
        top, spread = max(each), max(each) - min(each)
        if not spread:
            break
        raised = [weight * exp(SHARPNESS / ROUNDS**0.5 * (row - top) / spread) for weight, row in zip(weights, each, strict=True)]
        weights = [weight / sum(raised) for weight in raised]
    return best


def _mean(paths: Sequence[Path], weights: Sequence[float]) -> Path:
    rows = [[weight * each for each in (path.fixed, *path.layer)] for weight, path in zip(weights, paths, strict=True)]
    fixed, *layer = map(sum, zip(*rows, strict=True))
    return Path(fixed, tuple(layer))
