"""The data-parallel ranks over which engine `native` shards a weight, and those that own the same shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch.distributed as dist

from ....layers.rank_group import Group, GroupName
from ....parallel.process_groups import Grid
from ....plan.layout.gradient_routes import server_count
from ....spec.run import Run
from .parameter_servers import ParameterServers


class ShardGroups(NamedTuple):
    """The ranks over which a weight is sharded, and those that own the same shard; None: this rank alone. At ZeRO 0 some ranks may step
    weights for all, or sum gradients inside a node, then across nodes."""

    sharing: Group | None
    copies: Group | None
    servers: ParameterServers | None = None
    levels: tuple[Group, Group] | None = None


RowGroups = Mapping[bool, ShardGroups]  # of experts that ranks share out (True), and of other weights


def shard_groups(run: Run, grid: Grid, *, expert: bool) -> ShardGroups:
    """Return the groups of a weight: at ZeRO 0 each rank owns all of it."""
    if not run.parallel.zero:
        whole = grid.group("expert_worker_data" if expert else "worker_data")
        inside, across = grid.group("inside"), grid.group("across")
        if whole and (servers := server_count(run.parallel, grid.position.mesh)):
            return ShardGroups(None, None, servers=ParameterServers(whole, servers, keeps_all=run.parallel.staleness > 0))
        return ShardGroups(None, whole, levels=(inside, across) if inside and across and not expert else None)
    if expert:
        return ShardGroups(grid.group("expert_shard"), grid.group("expert_shard_copies"))
    return ShardGroups(grid.group("shard"), grid.group("shard_copies"))


def row_groups(run: Run, grid: Grid) -> RowGroups | None:
    """Return the groups over which ZeRO 3 shards rows, of experts that ranks share out (True) and of other weights; None where each rank
    keeps its weights whole. One rank alone has rows too where they stay in the host's memory."""
    if run.parallel.zero != 3 or not (grid.group("shard") or run.parallel.offload.parameters):
        return None
    experts, others = shard_groups(run, grid, expert=True), shard_groups(run, grid, expert=False)
    if alone := grid.alone:
        rank = grid.world.rank
        experts, others = _of_one_rank(experts, "expert_shard", rank, alone), _of_one_rank(others, "shard", rank, alone)
    return {False: others, True: experts}


def _of_one_rank(groups: ShardGroups, name: GroupName, rank: int, alone: dist.ProcessGroup) -> ShardGroups:
    """Give a weight that no other rank shards a group of this rank alone."""
    return groups if groups.sharing else groups._replace(sharing=Group(name=name, ranks=(rank,), rank=0, handle=alone))
