"""Expert parallelism for DeepSpeed: which ranks sum the gradients of expert weights.

This module imports DeepSpeed: import it after `import_deepspeed()`. ZeRO 1 and 2 shard expert weights, a parameter group
of their own, over the ranks that hold the same experts, and divide their gradients by the size of the whole data axis: each expert sees
the tokens of all of its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn

from ...parallel.process_groups import Grid
from ..rank_parameter import RankParameter


class ExpertGroups(MoE):  # type: ignore[misc]
    """A module by which DeepSpeed recognises a mixture of experts and asks for its process groups: this one gives it ours."""

    def __init__(self, name: str, grid: Grid) -> None:
        nn.Module.__init__(self)
        self.name, self.grid, self.num_experts = name, grid, 1

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        for group, handles, ranks in (
            (self.grid.group("ep"), groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_PARALLEL_GROUP_RANKS),
            (self.grid.group("expert_copies"), groups._EXPERT_DATA_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP_RANKS),
        ):
            handles[self.name] = group.handle if group else self.grid.alone
            ranks[self.name] = list(group.ranks if group else (self.grid.world.rank,))
        groups.expert_tensor_parallel_world_size = self.grid.size("tp")  # then DeepSpeed sums norms over the tensor axis


def mark_experts(module: nn.Module, parameters: Sequence[RankParameter], grid: Grid) -> None:
    """Mark expert weights, and the model as a mixture of experts; call it before the optimizer and the engine exist.

    Frozen experts are not marked: DeepSpeed's optimizer for mixtures expects to step experts. They are left out of its broadcast alone,
    for ranks hold different ones.
    """
    name = f"ep_size_{grid.size('ep')}"  # in this form: DeepSpeed parses the number
    experts = [each.parameter for each in parameters if each.shard.expert]
    if not any(each.requires_grad for each in experts):
        for each in experts:
            each.ds_optim_param = True  # type: ignore[attr-defined]
        return
    for each in experts:
        each.allreduce, each.group_name = False, name  # type: ignore[attr-defined]
    module.add_module("deepspeed_experts", ExpertGroups(name, grid))
