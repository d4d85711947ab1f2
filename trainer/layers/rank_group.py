"""A group of ranks that send each other messages, and the names that such groups have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

# The mesh axes, then the groups that `Grid` of trainer/parallel/process_groups.py describes.
GroupName = Literal[
    "pp", "dp", "cp", "ep", "tp",
    "data", "model", "copies", "ends", "worker_data", "workers", "worker", "inside", "across", "shard", "shard_copies",
    "expert_copies", "expert_worker_data", "expert_workers", "expert_shard", "expert_shard_copies",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Group:
    """The global ranks of a group, in their order on the mesh; `rank` is the index of this process among them."""

    name: GroupName
    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup

    @property
    def size(self) -> int:
        return len(self.ranks)
