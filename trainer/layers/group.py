"""A group of ranks along one axis of the mesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks that this one meets along an axis, in order, and its place among them."""

    axis: str
    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup

    @property
    def size(self) -> int:
        return len(self.ranks)
