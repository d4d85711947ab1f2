"""Which source each sample of a run is of, where stages of the run blend the sources by weights of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ....spec.derived.data_blends import SampleBlend
from .order import Indices, blend, blend_counts


@dataclass(frozen=True, kw_only=True)
class SourceOrder:
    """The stages of a run: the first sample of each [stages], weights of the sources, and the samples of each source before it.

    A source goes on in a stage where it was left in the one before: nothing is skipped, and nothing read twice within an epoch.
    """

    firsts: Indices
    weights: tuple[tuple[float, ...], ...]
    before: tuple[Indices, ...]  # [sources] for each stage

    def locate(self, samples: Indices) -> tuple[Indices, Indices]:
        """Return (source [n], number of earlier samples of that source [n]) of each sample [n] of the run."""
        source, nth = np.empty_like(samples), np.empty_like(samples)
        stage_of = np.searchsorted(self.firsts, samples, "right") - 1
        for stage in np.unique(stage_of):
            mine, sources = stage_of == stage, _read_sources(self.weights[stage])
            chosen, within = blend(samples[mine] - self.firsts[stage], [self.weights[stage][each] for each in sources])
            source[mine] = sources[chosen]
            nth[mine] = self.before[stage][sources[chosen]] + within
        return source, nth


def source_order(stages: Sequence[SampleBlend]) -> SourceOrder:
    """Return the order of the stages of a run."""
    before = [np.zeros(len(stages[0].weights), np.int64)]
    for earlier, later in pairwise(stages):
        sources, read = _read_sources(earlier.weights), before[-1].copy()
        read[sources] += blend_counts(later.first - earlier.first, [earlier.weights[each] for each in sources])
        before.append(read)
    firsts = np.array([each.first for each in stages], np.int64)
    return SourceOrder(firsts=firsts, weights=tuple(each.weights for each in stages), before=tuple(before))


def _read_sources(weights: Sequence[float]) -> Indices:
    """Return the sources with a weight above 0."""
    return np.flatnonzero(np.array(weights) > 0)
