"""Sigmoid and SiLU gates of what attention and experts return. Each saves its inputs alone, and computes in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .compiled_outputs import as_output
from .dtypes import at_least_float32
from .parameters_by_prefix import Parameters
from .tensor_parallel import TensorParallel, gather_inputs

# B batch, S sequence, H hidden, A heads, D head_dim


def gated_product(x: Tensor, logits: Tensor) -> Tensor:
    """Return x times the sigmoid of its logits, of x's shape."""
    product: Tensor = _GatedProduct.apply(x, logits)  # type: ignore[no-untyped-call]
    return product


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, logits: Tensor) -> Tensor:
        ctx.save_for_backward(x, logits)
        return as_output((at_least_float32(x) * torch.sigmoid(at_least_float32(logits))).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, logits = ctx.saved_tensors
        share, wide_grad = torch.sigmoid(at_least_float32(logits)), at_least_float32(grad)
        logits_grad = wide_grad * at_least_float32(x) * share * (1 - share)
        return (wide_grad * share).to(x.dtype), logits_grad.to(logits.dtype)


def add_gated(total: Tensor, x: Tensor, logits: Tensor) -> Tensor:
    """Return total [B, S, H] + x times the sigmoid of a logit for each token, [B, S, 1]."""
    added: Tensor = _AddGated.apply(total, x, logits)  # type: ignore[no-untyped-call]
    return added


class _AddGated(torch.autograd.Function):
    """Saves x and the logits."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, x: Tensor, logits: Tensor) -> Tensor:
        ctx.save_for_backward(x, logits)
        return as_output((at_least_float32(total) + at_least_float32(x) * torch.sigmoid(at_least_float32(logits))).to(total.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, logits = ctx.saved_tensors
        share, wide_grad = torch.sigmoid(at_least_float32(logits)), at_least_float32(grad)
        logits_grad = (wide_grad * at_least_float32(x)).sum(-1, keepdim=True) * share * (1 - share)
        return grad, (wide_grad * share).to(x.dtype), logits_grad.to(logits.dtype)


class GatedNorm(nn.Module):
    """RMSNorm of each head of x [B, S, A, D], with one scale [D] for all heads, times the SiLU of a gate (arXiv:2412.06464 section 3.4).

    A tensor-parallel rank has the part of the scale's gradient that its own heads make. Ranks add these up in backward; under sequence
    parallelism they do so once a step, with the gradients of all weights that each rank holds whole.
    """

    def __init__(self, parameters: Parameters, eps: float, tp: TensorParallel | None) -> None:
        super().__init__()
        self.weight = parameters["weight"]
        self.eps, self.tp = eps, tp

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate [B, S, A, D] -> [B, S, A, D]."""
        weight = gather_inputs(self.weight, self.tp) if self.tp and not self.tp.sequence else self.weight
        output: Tensor = _GatedNorm.apply(x, gate, weight, self.eps)  # type: ignore[no-untyped-call]
        return output


class _GatedNorm(torch.autograd.Function):
    """Saves x, the gate, and one float32 a head and token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide, logits = at_least_float32(x), at_least_float32(gate)
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, gate, weight, inverse)
        return as_output((wide * inverse * at_least_float32(weight) * logits * torch.sigmoid(logits)).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, gate, weight, inverse = ctx.saved_tensors
        normed, logits, scale = at_least_float32(x) * inverse, at_least_float32(gate), at_least_float32(weight)
        share, wide_grad = torch.sigmoid(logits), at_least_float32(grad)
        gate_grad = wide_grad * normed * scale * (share * (1 + logits * (1 - share)))
        wide_grad = wide_grad * logits * share
        weight_grad = (wide_grad * normed).flatten(0, -2).sum(0)
        wide_grad = wide_grad * scale
        x_grad = inverse * (wide_grad - normed * (wide_grad * normed).mean(-1, keepdim=True))
        return x_grad.to(x.dtype), gate_grad.to(gate.dtype), weight_grad.to(weight.dtype), None
