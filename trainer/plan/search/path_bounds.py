"""Lower bounds of a step over all partitions of a model's layers, from paths through its actions.

Positions number the parts of the model stage by stage, in the order in which a search decides on their layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf
from typing import NamedTuple

from .split_arrays import Array
from .step_paths import Path

ROUNDS = 60  # of the weights of a combined path
SHARPNESS = 40.0  # how quickly they follow the slowest path
FIRST_ROWS = 32  # of the arrays of paths, which double


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


class PathBounds:
    """The bounds of all known paths on the ways to go on from the partition that is being made: arrays with a row for each path."""

    def __init__(self, limits: StageLimits) -> None:
        import numpy as np

        self.limits, self.made = limits, list[int]()
        """The layers of the first positions of that partition."""
        self.count, self.leasts = 0, list[float]()
        """How many paths there are, and the least seconds of each."""
        stages = len(limits.least)
        positions = stages * limits.chunks
        self._layer: Array = np.zeros((FIRST_ROWS, positions))
        self._behind: Array = np.zeros((FIRST_ROWS, positions, 2))
        self._tables: Array = np.zeros((FIRST_ROWS, stages + 1, limits.layers + 1))
        self._spent: Array = np.zeros((FIRST_ROWS, positions + 1))  # seconds on the positions before each

    def add(self, path: Path) -> None:
        """Bound partitions by another path, whose seconds are by position."""
        import numpy as np

        row = self.count
        if row == len(self._layer):
            every = (self._layer, self._behind, self._tables, self._spent)
            self._layer, self._behind, self._tables, self._spent = (np.concatenate([each, np.zeros_like(each)]) for each in every)
        bound = PathBound(path, self.limits)
        self._layer[row], self._behind[row], self._tables[row] = path.layer, bound.behind, bound.tables
        self._spent[row, 0] = path.fixed
        for at, many in enumerate(self.made):
            self._spent[row, at + 1] = self._spent[row, at] + path.layer[at] * many
        self.count += 1
        self.leasts.append(bound.least())

    def push(self, many: int) -> None:
        """Give the next position so many layers."""
        at, rows = len(self.made), slice(self.count)
        self._spent[rows, at + 1] = self._spent[rows, at] + self._layer[rows, at] * many
        self.made.append(many)

    def pop(self) -> None:
        """Take the layers of the last position back."""
        self.made.pop()

    def longest(self, choices: range, held: int, left: int) -> list[float]:
        """For each number of layers that the next position may have: the longest that a path is at least, whichever way the partition goes
        on. The stage of the position has `held` layers before it; `left` are the layers left."""
        import numpy as np

        if not choices:
            return []
        at, rows = len(self.made), slice(self.count)
        stage, chunk = divmod(at, self.limits.chunks)
        parts, many = self.limits.chunks - 1 - chunk, np.arange(choices.start, choices.stop)
        spent = self._spent[rows, at, None] + self._layer[rows, at, None] * many
        table = self._tables[rows, stage + 1]
        if not parts:
            rest = table[:, left - many]
        else:  # the later parts of the stage have some more layers, of which the cheapest part has all but one each
            fewest = np.maximum(parts, self.limits.least[stage] - held - many)[:, None]
            most = np.minimum(left, self.limits.most[stage] - held)
            more = np.arange(fewest.min(), (most - many).max() + 1)
            legal = (more >= fewest) & (more <= (most - many)[:, None])
            behind = self._behind[rows, at]
            each = behind[:, :1] + (more - parts) * behind[:, 1:]
            after = table[:, np.where(legal, left - many[:, None] - more, 0)]
            rest = np.where(legal, each[:, None] + after, inf).min(axis=2, initial=inf)
        longest: list[float] = (spent + rest).max(axis=0, initial=0.0).tolist()
        return longest


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
