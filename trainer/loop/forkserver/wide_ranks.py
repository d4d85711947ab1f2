"""A fork server whose ranks compute in float64 wherever they would in float32: `prove` confirms departures on it.

`python -m distrain.trainer.loop.forkserver distrain.trainer.loop.forkserver.wide_ranks`: in its processes `torch.float32` is another
name of float64, before any module of ours or DeepSpeed's is imported. Weights, gradients, moments, messages, checkpoints and losses are
wide then.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def main() -> int:
    """Widen torch, and serve ranks and questions as the server of `distrain prove` does."""
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
    adam: Any = importlib.import_module("torch.optim.adam")
    adam._fused_adam = wide_adam
    from ..checkpoint.shard_file import SAFETENSORS_DTYPES
    from .server import main as serve_ranks

    SAFETENSORS_DTYPES[torch.float64] = "F64"
    return serve_ranks()


@torch.no_grad()
def wide_adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    largest: Sequence[Tensor],
    steps: Sequence[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    *,
    beta1: float,
    beta2: float,
    lr: float,
    weight_decay: float,
    eps: float,
    decoupled_weight_decay: bool,
    **rest: object,
) -> None:
    """Step weights as torch's fused Adam does, whose kernel takes the divisor of gradients in float32 alone."""
    if found_inf is not None and found_inf.item():
        return
    for weight, gradient, mean, square, step in zip(params, grads, means, squares, steps, strict=True):
        if grad_scale is not None:
            gradient.div_(grad_scale)
        step += 1
        if decoupled_weight_decay:
            weight.mul_(1 - lr * weight_decay)
        else:
            gradient = gradient + weight_decay * weight
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        taken = float(step)
        weight.addcdiv_(mean, (square / (1 - beta2**taken)).sqrt_().add_(eps), value=-lr / (1 - beta1**taken))
