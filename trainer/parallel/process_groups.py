"""The process groups of a rank; an axis of one rank has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch.distributed as dist

from ..layers.rank_group import Group, GroupName
from ..plan.axes import AXES
from ..plan.layout.mesh import Mesh, mesh_order
from ..plan.mesh_position import MeshPosition
from .world import COLLECTIVE_TIMEOUT, World

__all__ = ["FIGURES_GROUP", "Grid", "Group", "GroupName", "make_grid"]
FIGURES_GROUP = "figures of steps"  # describes a group of all ranks that sums these apart from other messages

Ranks = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A rank's position on the mesh and its process groups.

    The groups are one for each mesh axis, and these:

    - `data`, the ranks over which gradients are summed and ZeRO shards: dp x cp; the group of `dp` where cp has one rank.
    - `model`, the ranks that make up one replica of the model.
    - `copies`, the tensor-parallel ranks that hold the same key and value heads.
    - `ends`, the first and the last stage, which share a tied weight.
    - `expert_copies`, the data-parallel ranks that hold the same experts.
    - `worker_data`, the ranks of `data` that sum gradients at each step: all, or where workers step alone those of this rank's worker;
      `workers`, the ranks of all workers that step the same weights, which average them; for experts `expert_worker_data` and
      `expert_workers`. `worker`, all ranks of this rank's worker, is there where there are several.
    - `inside`, the ranks of `data` in a node, which sum gradients before the nodes do, and `across`, those of all nodes that have summed
      the same part; both are there only where sums have two levels.
    - `shard`, the ranks of `worker_data` over which ZeRO shards, and `shard_copies`, those that own the same shard; for experts
      `expert_shard` and `expert_shard_copies`. Where ZeRO shards over all ranks these are `worker_data` and `expert_worker_data`, and no
      shard has a copy.
    """

    world: World
    position: MeshPosition
    groups: dict[GroupName, Group]
    alone: dist.ProcessGroup | None  # of this rank only, for callers that need a group where the axis has none

    def group(self, name: GroupName) -> Group | None:
        """The group with this name; None where it has one rank."""
        return self.groups.get(name)

    def size(self, name: GroupName) -> int:
        """Ranks in a group."""
        return self.groups[name].size if name in self.groups else 1

    def coordinate(self, name: GroupName) -> int:
        """This rank's number in a group."""
        return self.groups[name].rank if name in self.groups else 0


def make_grid(
    world: World,
    position: MeshPosition,
    *,
    copies: int = 1,
    shard: int | Literal["all"] = "all",
    worker: int | None = None,
    inner: int = 1,
    alone: bool = False,
) -> Grid:
    """Create the process groups; every rank calls it. `copies` neighbours on the tensor axis hold the same key and value heads; ZeRO shards
    over `shard` ranks of the data axis, `worker` ranks of which step together (None: all); `inner` of them, where there are several, sum
    gradients before the nodes do. `alone`: a group of one rank is needed whatever the axes are."""
    groups: dict[GroupName, Group] = {}
    apart = worker is not None and worker < position.mesh.size("data")
    for name, rows in _group_ranks(position.mesh, copies, shard, worker if apart else None, inner):
        if len(rows[0]) == 1:
            continue
        for ranks in rows:
            # One even of all ranks: the ledger tells axes apart by their groups.
            handle = dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT, group_desc=name)
            if world.rank in ranks:
                groups[name] = Group(name=name, ranks=ranks, rank=ranks.index(world.rank), handle=handle)
    if _data_is_dp(position.mesh) and "dp" in groups:
        groups["data"] = groups["dp"]
    if not apart:
        _name_again(groups, {"worker_data": "data", "expert_worker_data": "expert_copies"})
    if shard == "all":
        _name_again(groups, {"shard": "worker_data", "expert_shard": "expert_worker_data"})
    needs_own = alone or {"ep", "tp"} & groups.keys()
    return Grid(world=world, position=position, groups=groups, alone=_single_rank_group(world) if needs_own else None)


def _name_again(groups: dict[GroupName, Group], names: Mapping[GroupName, GroupName]) -> None:
    """Give each group that is there a second name: new name = its name."""
    groups |= {name: groups[known] for name, known in names.items() if known in groups}


def _single_rank_group(world: World) -> dist.ProcessGroup:
    own: list[dist.ProcessGroup] = [dist.new_group([rank], timeout=COLLECTIVE_TIMEOUT) for rank in range(world.size)]
    return own[world.rank]


def _group_ranks(
    mesh: Mesh, copies: int, shard: int | Literal["all"], worker: int | None, inner: int
) -> Iterator[tuple[GroupName, list[Ranks]]]:
    """(name, the ranks of every group of that name)."""
    for axis in AXES:
        yield cast(GroupName, axis), list(mesh.groups(axis))
    if not _data_is_dp(mesh):
        yield "data", list(mesh.groups("data"))
    yield "model", _replicas(mesh)
    yield "copies", [group[at : at + copies] for group in mesh.groups("tp") for at in range(0, mesh.tp, copies)]
    if mesh.ep > 1:
        yield "expert_copies", list(mesh.groups("expert_copies"))
    if worker is not None:
        together, apart = mesh.sharding_groups("data", worker)
        yield from (("worker_data", together), ("workers", apart), ("worker", _whole_workers(mesh, together)))
        if mesh.ep > 1:
            yield from zip(("expert_worker_data", "expert_workers"), mesh.sharding_groups("expert_copies", worker // mesh.ep), strict=True)
    if inner > 1:
        yield from zip(("inside", "across"), mesh.sharding_groups("data", inner), strict=True)
    if shard != "all":
        yield from zip(("shard", "shard_copies"), mesh.sharding_groups("data", shard), strict=True)
        if mesh.ep > 1:
            yield from zip(("expert_shard", "expert_shard_copies"), mesh.sharding_groups("expert_copies", shard // mesh.ep), strict=True)
    if mesh.pp > 1:
        yield "ends", [(group[0], group[-1]) for group in mesh.groups("pp")]


def _whole_workers(mesh: Mesh, together: list[Ranks]) -> list[Ranks]:
    """The ranks of each worker: those of the replicas that its ranks of the data axis are parts of."""
    replica_of = {rank: ranks for ranks in _replicas(mesh) for rank in ranks}
    workers = (tuple(sorted({rank for each in data for rank in replica_of[each]})) for data in together)
    return list(dict.fromkeys(workers))


def _data_is_dp(mesh: Mesh) -> bool:
    """Whether the data axis is dp alone."""
    return mesh.size("data") == mesh.dp


def _replicas(mesh: Mesh) -> list[Ranks]:
    """The ranks of each replica, which together hold each element of the model once: they differ on the axes that split weights."""
    replicas: dict[Ranks, list[int]] = {}
    for rank in range(mesh.world):
        coordinates = mesh.coordinates(rank)
        replicas.setdefault(tuple(coordinates[axis] for axis in mesh_order() if AXES[axis].data), []).append(rank)
    return [tuple(ranks) for ranks in replicas.values()]
