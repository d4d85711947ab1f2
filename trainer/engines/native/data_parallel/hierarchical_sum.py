"""Gradients that are summed inside a node first, then between nodes (parallel.reduce=hierarchical)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ....layers.rank_group import Group


class HierarchicalSum:
    """Sums a bucket's gradients: each rank of a node sums a part of them, the ranks that have the same part sum it over the nodes, and the
    node gathers the parts."""

    is_on = True

    def __init__(self, gradients: Tensor, inside: Group, across: Group) -> None:
        """`gradients` [E] is the bucket's flat tensor; the ranks of `inside`, which divide E, share a node."""
        self._gradients, self._inside, self._across = gradients, inside, across
        self._part = gradients.new_zeros(gradients.numel() // inside.size)

    def begin(self) -> Any:
        return dist.reduce_scatter_tensor(self._part, self._gradients, group=self._inside.handle, async_op=True)

    def go_on(self) -> Any:
        return dist.all_reduce(self._part, group=self._across.handle, async_op=True)

    def complete(self) -> Any:
        return dist.all_gather_into_tensor(self._gradients, self._part, group=self._inside.handle, async_op=True)

    def held_tensors(self) -> Sequence[Tensor]:
        return (self._part,)
