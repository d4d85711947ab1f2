"""Expert parallelism as DeepSpeed knows it: whose gradients add up over which ranks.

DeepSpeed is imported with this module: import it after `deepspeed()` of settings.py. Its ZeRO 1 and 2 give expert weights an
optimizer group of their own, which lies on the ranks that hold the same experts, and divide their gradients by the whole data axis,
since each expert has seen the tokens of all of its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn

from ...parallel.process_groups import Grid
from .partitions import Holding


class Mark(MoE):  # type: ignore[misc]
    """By a module of this kind DeepSpeed sees that there are experts, and asks it to make their groups: it is given ours."""

    def __init__(self, name: str, grid: Grid) -> None:
        nn.Module.__init__(self)
        self.name, self.grid, self.num_experts = name, grid, 1

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        for axis, handles, ranks in (
            ("ep", groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_PARALLEL_GROUP_RANKS),
            ("expert_copies", groups._EXPERT_DATA_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP_RANKS),
        ):
            group = self.grid.group(axis)
            handles[self.name] = group.handle if group else self.grid.alone
            ranks[self.name] = list(group.ranks if group else (self.grid.world.rank,))
        groups.expert_tensor_parallel_world_size = self.grid.size("tp")  # a norm is then summed over the tensor axis


def tell(module: nn.Module, holdings: Sequence[Holding], grid: Grid) -> None:
    """Mark expert weights, and the model as one that has them, before there are an optimizer and an engine."""
    name = f"ep_size_{grid.size('ep')}"  # of this form: DeepSpeed reads the number off it
    for each in holdings:
        if each.placed.expert:
            each.parameter.allreduce, each.parameter.group_name = False, name  # type: ignore[attr-defined]
    module.add_module("deepspeed_experts", Mark(name, grid))
