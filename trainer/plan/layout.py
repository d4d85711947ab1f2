"""From degrees to a layout: the mesh, micro-batches, and which layers each stage holds."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import NamedTuple

from ..spec.run import Parallel
from .axes.dp import Way
from .mesh import Mesh, Wires


class Kind(NamedTuple):
    """Stages that are alike: so many layers, and whether they hold the embedding and the head."""

    layers: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Partition:
    """Layers of each part along the model and of each stage, the kinds of stages there are, which kind each is, and how many are of
    each kind. A stage is one part; where the pipeline is folded, two."""

    parts: tuple[int, ...]
    counts: tuple[int, ...]
    kinds: tuple[Kind, ...]
    which: tuple[int, ...]
    many: tuple[int, ...]


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
        counts = self.partition.parts
        first = sum(counts[:part])
        return first, first + counts[part]

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
    kinds = tuple(dict.fromkeys(every))
    which = tuple(kinds.index(kind) for kind in every)
    return Partition(parts, counts, kinds, which, tuple(which.count(at) for at in range(len(kinds))))


def balanced(layers: int, stages: int, layer: float, first: float, last: float) -> tuple[int, ...]:
    """Layers of each stage: even where they divide; else one at a time to the stage that is lightest with it.

    `layer` is a layer's load, `first` and `last` those of the embedding and the head, in one unit. With layers alike
    this is the split whose fullest stage is lightest.
    """
    if layers % stages == 0:
        return (layers // stages,) * stages
    counts = [1] * stages
    heap = [(2 * layer + (stage == 0) * first + (stage == stages - 1) * last, stage) for stage in range(stages)]
    heapify(heap)
    for _ in range(layers - stages):
        load, stage = heap[0]
        counts[stage] += 1
        heapreplace(heap, (load + layer, stage))
    return tuple(counts)
