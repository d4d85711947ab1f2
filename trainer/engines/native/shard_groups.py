"""The data-parallel ranks over which engine `native` shards a weight, and those that own the same shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...layers.group import Group
from ...parallel.process_groups import Grid
from ...spec.run import Run


class ShardGroups(NamedTuple):
    """The ranks over which a weight is sharded, and those that own the same shard; None: this rank alone."""

    sharing: Group | None
    copies: Group | None


RowGroups = Mapping[bool, ShardGroups]  # of experts that ranks share out (True), and of other weights


def shard_groups(run: Run, grid: Grid, *, expert: bool) -> ShardGroups:
    """Return the groups of a weight: at ZeRO 0 each rank owns all of it."""
    if not run.parallel.zero:
        return ShardGroups(None, grid.group("expert_worker_data" if expert else "worker_data"))
    shard = "expert_shard" if expert else "shard"
    return ShardGroups(grid.group(shard), grid.group(f"{shard}_copies"))


def row_groups(run: Run, grid: Grid) -> RowGroups | None:
    """Return the groups over which ZeRO 3 shards rows, of experts that ranks share out (True) and of other weights; None where each rank
    keeps its weights whole."""
    if run.parallel.zero != 3 or not grid.group("shard"):
        return None
    experts = shard_groups(run, grid, expert=True)
    if experts.sharing is None and grid.alone:
        rank = grid.world.rank
        experts = experts._replace(sharing=Group(axis="expert_shard", ranks=(rank,), rank=0, handle=grid.alone))
    return {False: shard_groups(run, grid, expert=False), True: experts}
