"""A layout: its mesh, its micro-batches, and the layers of each stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, groupby
from typing import NamedTuple

from ...spec.run import Parallel
from ..axes import AXES
from ..axes.axis import ActivationForm
from ..axes.dp import GradientSync
from .mesh import Mesh, Wires, replica_size
from .schedules import Schedule
from .update_delay import Delay

ONE_BY_ONE = 20_000  # layers up to which all are assigned one at a time
LAST_LAYERS = 2  # of a stage, which are assigned one at a time in larger models


class StageKind(NamedTuple):
    """Stages with the same number of layers, with or without the embedding (`first`) and the head (`last`).

    The first stage has the model's dense layers too, which `layers` does not count.
    """

    layers: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class LayerPartition:
    """The layers of a model as parts and stages. A stage holds one part or several: in a folded pipeline two, else its chunks.

    The first part has the model's `dense_layers` beside those that are counted.
    """

    parts: tuple[int, ...]  # layers of each part, in the order of the model
    counts: tuple[int, ...]  # layers of each stage
    kinds: tuple[StageKind, ...]
    kind_of_stage: tuple[int, ...]  # the index into `kinds` of each stage
    stages_of_kind: tuple[int, ...]  # how many stages are of each kind
    starts: tuple[int, ...]  # the first layer of each part, then the number of layers, dense ones included
    runs: tuple[tuple[int, int], ...]  # (first stage, kind) of neighbouring stages of one kind
    is_folded: bool  # stage r of p holds the parts r and 2p - 1 - r; else r, r + p, r + 2p, ...
    dense_layers: int

    @property
    def whole_parts(self) -> tuple[int, ...]:
        """The layers of each part, dense ones included, as `parallel.stages` has them."""
        return (self.dense_layers + self.parts[0], *self.parts[1:])

    @property
    def whole_counts(self) -> tuple[int, ...]:
        """The layers of each stage, dense ones included."""
        return (self.dense_layers + self.counts[0], *self.counts[1:])


class Layout(NamedTuple):
    """Degrees and what follows from them."""

    parallel: Parallel
    microbatch: int  # sequences of a micro-batch
    micros: int  # micro-batches of a replica in a step
    gradient_sync: GradientSync
    mesh: Mesh
    wires: Wires
    partition: LayerPartition
    schedule: Schedule  # of its stages; 1f1b where a file would name it and there is one stage
    delay: Delay | None  # how late weights are updated; None: each step flushes, as it does without stages
    shard_ranks: int  # ranks over which ZeRO shards
    expert_shard_ranks: int  # ranks over which it shards experts
    worker_ranks: int  # ranks of the data axis that sum gradients at each step: all of them, or those of a worker
    engine: str | None  # the engine that runs it, whose costs are planned; None: the papers' costs
    form: ActivationForm
    fused: bool  # layers are compiled: their pointwise operators are one kernel

    def parts(self, stage: int) -> tuple[int, ...]:
        """The parts of the model that a stage holds, by their number, in the order of its chunks."""
        many, stages = len(self.partition.parts), self.mesh.pp
        return (stage, many - 1 - stage) if self.is_folded else tuple(range(stage, many, stages))

    def layers(self, part: int) -> tuple[int, int]:
        """(first, last + 1) of a part's layers."""
        return self.partition.starts[part], self.partition.starts[part + 1]

    @property
    def offloads(self) -> bool:
        """Whether anything is offloaded to the host."""
        return bool(self.parallel.offload.names)

    @property
    def is_folded(self) -> bool:
        """Whether each stage holds two parts, the first stage both ends of the model."""
        return self.partition.is_folded

    @property
    def chunks(self) -> int:
        """Parts that a stage holds."""
        return len(self.partition.parts) // self.mesh.pp


def mesh_of(parallel: Parallel, world: int) -> Mesh:
    """The mesh of a cluster of `world` ranks; `dp: auto` takes all ranks that the other axes leave."""
    dp = world // replica_size(parallel) if parallel.dp == "auto" else parallel.dp
    return _mesh(tuple([(name, dp if name == "dp" else getattr(parallel, name)) for name in AXES]))


@lru_cache(maxsize=4096)
def _mesh(degrees: tuple[tuple[str, int], ...]) -> Mesh:
    return Mesh(**dict(degrees))


def layer_partition(parts: tuple[int, ...], *, chunks: int = 1, folded: bool = False, dense_layers: int = 0) -> LayerPartition:
    """The stages of parts with these layers, `chunks` parts a stage (folded: two, its first stage with both ends of the model). The first
    part has `dense_layers` besides."""
    stages = len(parts) // (2 if folded else chunks)
    if folded:
        counts = tuple(one + other for one, other in zip(parts[:stages], reversed(parts[stages:]), strict=True))
    else:
        counts = parts if chunks == 1 else tuple(sum(parts[stage::stages]) for stage in range(stages))
    last = 0 if folded else stages - 1
    every = [StageKind(layers, stage == 0, stage == last) for stage, layers in enumerate(counts)]
    kinds = {kind: at for at, kind in enumerate(dict.fromkeys(every))}
    kind_of_stage = tuple([kinds[kind] for kind in every])
    runs = tuple((next(stages)[0], at) for at, stages in groupby(enumerate(kind_of_stage), key=lambda row: row[1]))
    stages_of_kind = tuple(kind_of_stage.count(at) for at in range(len(kinds)))
    starts = (0, *[dense_layers + end for end in accumulate(parts)])
    return LayerPartition(parts, counts, tuple(kinds), kind_of_stage, stages_of_kind, starts, runs, folded, dense_layers)


@lru_cache(maxsize=64)
def split_layers(
    layers: int, stages: int, layer: float, first: float, last: float, *, chunks: int = 1, folded: bool, dense_layers: int = 0
) -> LayerPartition:
    """The stages of a model whose layers are balanced over its parts; its `dense_layers` come before them, in the first part."""
    parts = stages * (2 if folded else chunks)
    counts = balanced_layers(layers, parts, layer, first, last, even=not dense_layers)
    return layer_partition(counts, chunks=chunks, folded=folded, dense_layers=dense_layers)


def balanced_layers(layers: int, stages: int, layer: float, first: float, last: float, *, even: bool = True) -> tuple[int, ...]:
    """Layers of each stage: even where they divide, if that is asked for; else each layer goes to the stage that is lightest with it.

    `layer` is a layer's load, `first` and `last` are those of what the first stage has before its layers and the last stage after them,
    in the same unit. With equal layers this is the split whose fullest stage is lightest.
    """
    if even and layers % stages == 0:
        return (layers // stages,) * stages
    counts = [1] * stages if layers - stages <= ONE_BY_ONE else _almost_balanced_layers(layers, stages, layer, first, last)
    ends = {0: first, stages - 1: last} if stages > 1 else {0: first + last}
    heap = [((each + 1) * layer + ends.get(stage, 0.0), stage) for stage, each in enumerate(counts)]
    heapify(heap)
    for _ in range(layers - sum(counts)):
        load, stage = heap[0]
        counts[stage] += 1
        heapreplace(heap, (load + layer, stage))
    return tuple(counts)


def _almost_balanced_layers(layers: int, stages: int, layer: float, first: float, last: float) -> list[int]:
    """Layers of each stage, a few fewer than it ends with: equal loads, embedding and head counted as the layers that they weigh."""
    middle = max(0, stages - 2)
    ends = sorted((int(first / layer), int(last / layer)))
    level = (layers + sum(ends)) // stages
    if level <= ends[1]:
        level = (layers - 1 + ends[0]) // (middle + 1)
    if level <= ends[0]:
        level = (layers - 2) // max(1, middle)
    short = [max(1, level - int(end / layer) - LAST_LAYERS) for end in (first, last)]
    return [short[0], *[max(1, level - LAST_LAYERS)] * middle, short[1]]
