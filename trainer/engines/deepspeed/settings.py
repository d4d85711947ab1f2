"""DeepSpeed as it is imported here, and torch's optimizer that it is given."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...plan.deepspeed.config import config as config
from ...plan.deepspeed.config import stage as stage
from ...spec.run import Run


def deepspeed() -> Any:
    """DeepSpeed, imported quietly. On a CPU no op is compatible, so that none is compiled behind the user's back."""
    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))
    elif not all(word.strip().isdigit() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")):
        from deepspeed.accelerator import cuda_accelerator

        cuda_accelerator.pynvml = None  # it reads these names as numbers; without it torch is asked for free memory
    return deepspeed


def decayed(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices decay, norms and biases don't. Experts that other ranks have others of are apart."""
    rows = [parameter for parameter in parameters if parameter.requires_grad]
    apart = [row for row in rows if not getattr(row, "allreduce", True)]
    here = [row for row in rows if getattr(row, "allreduce", True)]
    return [
        {"params": [row for row in here if _dims(row) > 1], "weight_decay": weight_decay},
        {"params": [row for row in here if _dims(row) <= 1], "weight_decay": 0.0},
        {"params": apart, "weight_decay": weight_decay, "moe": True, "name": getattr(apart[0], "group_name", "") if apart else ""},
    ]


def _dims(parameter: nn.Parameter) -> int:
    """Of the whole, where ZeRO-3 has shared it out."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def optimizer(run: Run, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's own optimizer: DeepSpeed's is a compiled op on a CPU."""
    optim = run.optim
    groups = [group for group in decayed(parameters, optim.weight_decay) if group["params"]]
    match optim.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
        case "sgd":
            return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)
