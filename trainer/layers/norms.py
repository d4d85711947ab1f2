"""LayerNorm and RMSNorm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..spec.run import Model
from .dtypes import at_least_float32
from .parameters_by_prefix import Parameters
from .tensor_parallel import TensorParallel, gather_inputs

# B batch, S sequence, H hidden


class LayerNorm(nn.Module):
    """(x - mean) / deviation, scaled and shifted; torch computes it in float32."""

    def __init__(self, parameters: Parameters, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = parameters["weight"], parameters["bias"]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / its root mean square, scaled; computed in float32 (arXiv:1910.07467)."""

    def __init__(self, parameters: Parameters, eps: float) -> None:
        super().__init__()
        self.weight = parameters["weight"]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class HeadNorm(nn.Module):
    """RMSNorm of each head of x [B, S, A, D], with one scale [D] for all heads; before rope in Qwen3 (arXiv:2505.09388 section 2).

    A tensor-parallel rank has the part of the scale's gradient that its own heads make. Ranks add these up in backward; under sequence
    parallelism they do so once a step, with the gradients of all weights that each rank holds whole.
    """

    def __init__(self, parameters: Parameters, eps: float, tp: TensorParallel | None) -> None:
        super().__init__()
        self.weight = parameters["weight"]
        self.eps, self.tp = eps, tp

    def forward(self, x: Tensor) -> Tensor:
        weight = gather_inputs(self.weight, self.tp) if self.tp and not self.tp.sequence else self.weight
        return rms_norm(x, weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / its root mean square along the last dim, scaled by `weight`."""
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)  # one kernel, which saves the same as ours
    normed: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(torch.autograd.Function):
    """Saves x in its own dtype and one float32 per token; autograd of the formula would save x twice in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = at_least_float32(x)  # [B, S, H]
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # [B, S, 1]
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normed, wide_grad = at_least_float32(x) * inverse, at_least_float32(grad)
        weight_grad = (wide_grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        wide_grad = wide_grad * weight
        x_grad = inverse * (wide_grad - normed * (wide_grad * normed).mean(-1, keepdim=True))
        return x_grad.to(x.dtype), weight_grad, None


def make_norm(model: Model, parameters: Parameters) -> nn.Module:
    """Make the norm that `model.norm` names."""
    match model.norm:
        case "layernorm":
            return LayerNorm(parameters, model.norm_eps)
        case "rmsnorm":
            return RMSNorm(parameters, model.norm_eps)
