"""Torch's own optimizer of a rank's parameters, in groups that decay and groups that do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..spec.run import Run


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups: matrices decay, norms and biases do not; weights of experts split over ranks are a group of their own."""
    rows = [parameter for parameter in parameters if parameter.requires_grad]
    experts = [row for row in rows if not getattr(row, "allreduce", True)]
    dense = [row for row in rows if getattr(row, "allreduce", True)]
    return [
        {"params": [row for row in dense if _dims(row) > 1], "weight_decay": weight_decay},
        {"params": [row for row in dense if _dims(row) <= 1], "weight_decay": 0.0},
        {"params": experts, "weight_decay": weight_decay, "moe": True, "name": getattr(experts[0], "group_name", "") if experts else ""},
    ]


def _dims(parameter: nn.Parameter) -> int:
    """Return the dims of the whole parameter, which ZeRO-3 may have partitioned."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def torch_optimizer(run: Run, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's own optimizer: on a CPU DeepSpeed's is a compiled op."""
    return optimizer_of_groups(run, [group for group in parameter_groups(parameters, run.optim.weight_decay) if group["params"]])


def optimizer_of_groups(run: Run, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return torch's own optimizer of parameter groups."""
    optim = run.optim
    match optim.name:
        case "adamw" | "muon":  # Muon steps the layers' matrices (engines/native/muon.py), and no parameter here
            return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
        case "sgd":
            return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)
