"""What a search keeps: the fastest layout of each mesh, and those that no other beats in both time and memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from math import inf
from typing import NamedTuple

from ...spec.run import Parallel
from .space import Candidate

MeshKey = tuple[int, int, int, int]  # tp, pp, cp, ep


class CostedLayout(NamedTuple):
    """A layout that fits: the seconds by which it is ranked (run_seconds.py; infinite: not known) and the bytes of the
    fullest rank, in the order of preference."""

    seconds: float
    peak: int
    candidate: Candidate


class Front:
    """The layouts in ascending seconds and descending bytes: each is the fastest of those that hold no more."""

    def __init__(self) -> None:
        self.rows: list[CostedLayout] = []
        self.fastest = inf  # seconds
        self._seconds: list[float] = []

    def beats(self, seconds: float, peak: float) -> bool:
        """Whether a layout is known that is as fast and as small as these figures."""
        return self.least_peak(seconds) <= peak

    def least_peak(self, seconds: float) -> float:
        """The bytes of the smallest layout that is known to be as fast; infinite where there is none."""
        at = bisect_right(self._seconds, seconds)
        return self.rows[at - 1].peak if at else inf

    def add(self, found: CostedLayout) -> None:
        """Keep a layout, and drop those that it beats."""
        if self.beats(found.seconds, found.peak):
            return
        at = bisect_left(self._seconds, found.seconds)
        end = at
        while end < len(self.rows) and self.rows[end].peak >= found.peak:
            end += 1
        self.rows[at:end], self._seconds[at:end] = [found], [found.seconds]
        self.fastest = self._seconds[0]


class Best:
    """The best layout of each mesh; a layout is better by its objective, then by the other figure."""

    def __init__(self, rows: int, *, by_memory: bool) -> None:
        self.rows, self.by_memory = rows, by_memory
        self.of_mesh: dict[MeshKey, CostedLayout] = {}
        self._keys: list[tuple[float, float]] = []

    def key(self, seconds: float, peak: float) -> tuple[float, float]:
        """What is compared."""
        return (peak, seconds) if self.by_memory else (seconds, peak)

    def may_enter(self, mesh: MeshKey, seconds: float, peak: float) -> bool:
        """Whether a layout with at least these figures may be the best of its mesh, and its mesh one of the best."""
        key = self.key(seconds, peak)
        known = self.of_mesh.get(mesh)
        if known is not None and key >= self.key(known.seconds, known.peak):
            return False
        return len(self._keys) < self.rows or key < self._keys[self.rows - 1]

    def add(self, mesh: MeshKey, found: CostedLayout) -> None:
        """Keep a layout if it is the best of its mesh."""
        key, known = self.key(found.seconds, found.peak), self.of_mesh.get(mesh)
        if known is not None:
            old = self.key(known.seconds, known.peak)
            if key >= old:
                return
            self._keys.remove(old)
        self.of_mesh[mesh] = found
        insort(self._keys, key)

    def best_layouts(self) -> list[CostedLayout]:
        """The best layouts of the best meshes."""
        return sorted(self.of_mesh.values(), key=lambda each: self.key(each.seconds, each.peak))[: self.rows]


def mesh_key(parallel: Parallel) -> MeshKey:
    """The degrees of a mesh; dp follows."""
    return parallel.tp, parallel.pp, parallel.cp, parallel.ep
