"""From degrees to a layout: the mesh, micro-batches, and which layers each stage holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, groupby
from typing import NamedTuple

from ..spec.run import Parallel
from .axes.dp import Way
from .mesh import Mesh, Wires

ONE_BY_ONE = 20_000  # layers that are dealt out one at a time
FEW = 2  # layers of a stage that are, where there are more


class Kind(NamedTuple):
    """Stages that are alike: so many layers, and whether they hold the embedding and the head."""

    layers: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Partition:
    """Layers of each part along the model and of each stage, the kinds of stages there are, which kind each is, and how many are of
    each kind. A stage is one part; where the pipeline is folded, two. `starts` is each part's first layer, and the end; `runs` are
    (first stage, kind) of neighbouring stages that are alike."""

    parts: tuple[int, ...]
    counts: tuple[int, ...]
    kinds: tuple[Kind, ...]
    which: tuple[int, ...]
    many: tuple[int, ...]
    starts: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where everything is: the mesh and its wires, micro-batches of a replica a step, layers of each stage, ranks that ZeRO
    shards over."""

    parallel: Parallel
    mesh: Mesh
    wires: Wires
    micros: int
    microbatch: int
    partition: Partition
    shard: int
    expert_shard: int
    way: Way  # of the data axis

    def parts(self, stage: int) -> tuple[int, ...]:
        """The parts of the model that a stage holds, by their places along it."""
        last = len(self.partition.parts) - 1
        return (stage, last - stage) if self.folded else (stage,)

    def layers(self, part: int) -> tuple[int, int]:
        """[first, last + 1] of a part's layers."""
        return self.partition.starts[part], self.partition.starts[part + 1]

    @property
    def folded(self) -> bool:
        """Whether each stage holds two parts, the first stage both ends."""
        return len(self.partition.parts) > self.mesh.pp


def mesh_of(parallel: Parallel, world: int) -> Mesh:
    """The mesh of a cluster of `world` ranks; `dp: auto` takes all that the other axes leave."""
    dp = world // (parallel.tp * parallel.pp * parallel.cp) if parallel.dp == "auto" else parallel.dp
    return Mesh(pp=parallel.pp, dp=dp, cp=parallel.cp, ep=parallel.ep, tp=parallel.tp)


def partition(parts: tuple[int, ...], *, folded: bool = False) -> Partition:
    """The stages that hold parts of so many layers: one each; folded, the first and the last, the second and the last but one ..."""
    stages = len(parts) // 2 if folded else len(parts)
    counts = tuple(one + other for one, other in zip(parts[:stages], reversed(parts[stages:]), strict=True)) if folded else parts
    last = 0 if folded else stages - 1
    every = [Kind(layers, stage == 0, stage == last) for stage, layers in enumerate(counts)]
    kinds = {kind: at for at, kind in enumerate(dict.fromkeys(every))}
    which = tuple([kinds[kind] for kind in every])
    runs = tuple((next(stages)[0], at) for at, stages in groupby(enumerate(which), key=lambda row: row[1]))
    many = tuple(which.count(at) for at in range(len(kinds)))
    return Partition(parts, counts, tuple(kinds), which, many, (0, *accumulate(parts)), runs)


@lru_cache(maxsize=64)
def split_layers(layers: int, parts: int, layer: float, first: float, last: float, *, folded: bool) -> Partition:
    """The stages of a model whose layers are balanced over so many parts."""
    return partition(balanced(layers, parts, layer, first, last), folded=folded)


def balanced(layers: int, stages: int, layer: float, first: float, last: float) -> tuple[int, ...]:
    """Layers of each stage: even where they divide; else one at a time to the stage that is lightest with it.

    `layer` is a layer's load, `first` and `last` those of the embedding and the head, in one unit. With layers alike
    this is the split whose fullest stage is lightest.
    """
    if layers % stages == 0:
        return (layers // stages,) * stages
    counts = [1] * stages if layers - stages <= ONE_BY_ONE else _nearly(layers, stages, layer, first, last)
    ends = {0: first, stages - 1: last} if stages > 1 else {0: first + last}
    heap = [((each + 1) * layer + ends.get(stage, 0.0), stage) for stage, each in enumerate(counts)]
    heapify(heap)
    for _ in range(layers - sum(counts)):
        load, stage = heap[0]
        counts[stage] += 1
        heapreplace(heap, (load + layer, stage))
    return tuple(counts)


def _nearly(layers: int, stages: int, layer: float, first: float, last: float) -> list[int]:
    """Layers of each stage, a few less than it ends with: all as loaded, embedding and head counted as the layers that they weigh."""
    middle = max(0, stages - 2)
    ends = sorted((int(first / layer), int(last / layer)))
    level = (layers + sum(ends)) // stages
    if level <= ends[1]:
        level = (layers - 1 + ends[0]) // (middle + 1)
    if level <= ends[0]:
        level = (layers - 2) // max(1, middle)
    short = [max(1, level - int(end / layer) - FEW) for end in (first, last)]
    return [short[0], *[max(1, level - FEW)] * middle, short[1]]
