"""Torch's own optimizer of a rank's parameters, in groups that decay and groups that do not."""

from __future__ import annotations

from typing import Any, assert_never

import torch
from torch import nn

from ..spec.derived.weight_decay import is_decayed
from ..spec.run import Run


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups: matrices decay, norms and biases do not; weights of experts split over ranks are groups of their own."""
    rows = [(parameter, is_decayed(name, _dims(parameter))) for name, parameter in module.named_parameters() if parameter.requires_grad]
    groups = []
    for is_expert in (False, True):
        for decays in (True, False):
            some = [row for row, each in rows if each is decays and is_expert is not getattr(row, "allreduce", True)]
            group = {"params": some, "weight_decay": weight_decay if decays else 0.0}
            if some:
                groups.append(group | ({"moe": True, "name": getattr(some[0], "group_name", "")} if is_expert else {}))
    return groups


def _dims(parameter: nn.Parameter) -> int:
    """Return the dims of the whole parameter, which ZeRO-3 may have partitioned."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def torch_optimizer(run: Run, module: nn.Module) -> torch.optim.Optimizer:
    """Return torch's own optimizer of a module's parameters: on a CPU DeepSpeed's is a compiled op."""
    return optimizer_of_groups(run, parameter_groups(module, run.optim.weight_decay))


def optimizer_of_groups(run: Run, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return torch's own optimizer of parameter groups."""
    optim = run.optim
    match optim.name:
        case "adamw" | "muon":  # Muon steps the layers' matrices (engines/native/muon.py), and no parameter here
            return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
        case "sgd":
            return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, fused=True)  # else weight decay makes a tensor a step
        case _:
            assert_never(optim.name)
