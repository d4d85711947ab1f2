"""A group of ranks along one axis of the mesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Group:
    """The global ranks of a group, in the axis' order; `rank` is the index of this process among them."""

    axis: str
    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup

    @property
    def size(self) -> int:
        return len(self.ranks)
