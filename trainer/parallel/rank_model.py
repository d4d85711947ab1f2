"""A rank's part of the model as a module, and the tensor and context axes as its layers see them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..layers.tensor_parallel import TensorParallel
from ..layers.transformer.context_parallel import ContextParallel
from ..models.families import op_table
from ..plan.axes.weight_slices import HeadShards, WeightShard
from ..spec.run import Run
from .process_groups import Grid


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """A part of the model as this rank holds it: its module and, by parameter name, its weight shards.

    A parameter carries `tensor_model_parallel`, which DeepSpeed reads for the gradient norm: whether this rank counts it. One rank of a
    replica counts each element of the model. `tied` names the copies of weights that belong to another part.
    """

    module: nn.Module
    weight_shards: dict[str, WeightShard]
    tied: tuple[str, ...] = ()


def tensor_parallel_of(run: Run, grid: Grid) -> TensorParallel | None:
    """The tensor axis as layers see it; None where it has one rank."""
    group = grid.group("tp")
    if group is None:
        return None
    shards = head_shards(run, group.size)
    heads = shards.query_shard(group.rank)
    return TensorParallel(
        group=group,
        sequence=run.parallel.sequence,
        first_head=heads.offset,
        padded_heads=heads.size - heads.length,
        kv_copies=shards.copies,
    )


def context_parallel_of(run: Run, grid: Grid) -> ContextParallel | None:
    """The context axis as layers see it; None where it has one rank."""
    group = grid.group("cp")
    return None if group is None else ContextParallel(group=group, exchanges_heads=run.parallel.cp_comm == "all_to_all")


def head_shards(run: Run, degree: int) -> HeadShards:
    """The attention heads of a run's model on the ranks of the tensor axis."""
    sizes = op_table(run).sizes
    return HeadShards(sizes["heads"], sizes["kv_heads"], degree)
