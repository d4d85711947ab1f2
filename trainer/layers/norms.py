"""LayerNorm and RMSNorm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..spec.run import Model
from .compiled_outputs import as_output
from .dtypes import at_least_float32
from .group_messages import all_reduce
from .parameters_by_prefix import Parameters
from .rank_group import Group
from .tensor_parallel import TensorParallel, gather_inputs

# B batch, S sequence, H hidden, A heads, N key and value heads, D head_dim


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


class RMSNorm1p(nn.Module):
    """RMSNorm that scales by 1 + its weight, in float32, as Gemma does and Megatron-LM's apply_layernorm_1p."""

    def __init__(self, parameters: Parameters, eps: float) -> None:
        super().__init__()
        self.weight = parameters["weight"]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm_1p(x, self.weight, self.eps)


class HeadNorm(nn.Module):
    """RMSNorm of each head of x [B, S, A, D], with one scale [D] for all heads; before rope in Qwen3 (arXiv:2505.09388 section 2).

    A tensor-parallel rank has the part of the scale's gradient that its own heads make. Ranks add these up in backward; under sequence
    parallelism they do so once a step, with the gradients of all weights that each rank holds whole.
    """

    def __init__(self, parameters: Parameters, model: Model, tp: TensorParallel | None) -> None:
        super().__init__()
        self.weight = parameters["weight"]
        self.eps, self.tp, self.adds_one = model.norm_eps, tp, model.norm == "rmsnorm1p"

    def forward(self, x: Tensor) -> Tensor:
        weight = gather_inputs(self.weight, self.tp) if self.tp and not self.tp.sequence else self.weight
        return (rms_norm_1p if self.adds_one else rms_norm)(x, weight, self.eps)


class AllHeadsNorm(nn.Module):
    """RMSNorm of all heads of x [B, S, A D] together, with a scale for each element (arXiv:2501.00656 section 2).

    `width` is the number of elements of a whole token. Tensor-parallel ranks, which have some heads each, norm queries and keys by
    `norm_all_heads`.
    """

    def __init__(self, parameters: Parameters, eps: float, width: int) -> None:
        super().__init__()
        self.weight = parameters["weight"]
        self.eps, self.width = eps, width

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def norm_all_heads(
    query: Tensor, key: Tensor, query_norm: AllHeadsNorm, key_norm: AllHeadsNorm, tp: TensorParallel
) -> tuple[Tensor, Tensor]:
    """Return the normed queries [B, S, A D] and keys [B, S, N D] of this rank's heads; ranks add up both sums of squares in one message.

    A key head that several ranks hold is in their sum as often, and each of them has the part of its gradient that its own queries make.
    """
    widths = query_norm.width, key_norm.width * tp.kv_copies
    outputs: tuple[Tensor, Tensor] = _AllHeadsNorm.apply(  # type: ignore[no-untyped-call]
        query, key, query_norm.weight, key_norm.weight, query_norm.eps, widths, tp.group
    )
    return outputs


class _AllHeadsNorm(torch.autograd.Function):
    """Saves queries and keys in their own dtype and one float32 a token of each. Backward computes what is normed twice, so that float32
    copies of queries and of keys are never held together."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, widths: tuple[int, int], group: Group
    ) -> tuple[Tensor, Tensor]:
        pairs = ((query, query_weight), (key, key_weight))
        squares = [at_least_float32(x).square().sum(-1, keepdim=True) / width for (x, _), width in zip(pairs, widths, strict=True)]
        inverse = torch.rsqrt(all_reduce(torch.stack(squares), group) + eps)  # [2, B, S, 1]
        ctx.save_for_backward(query, key, query_weight, key_weight, inverse)
        ctx.widths, ctx.group = widths, group
        query, key = ((at_least_float32(x) * scale).to(x.dtype) * weight for (x, weight), scale in zip(pairs, inverse, strict=True))
        return query, key

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, query_weight, key_weight, inverse = ctx.saved_tensors
        rows = tuple(zip(grads, (query, key), (query_weight, key_weight), inverse, strict=True))
        sums = [_scale_gradient(grad, x, inverse) for grad, x, _, inverse in rows]  # [A D] of each
        parts = [_projections(*row) / width for row, width in zip(rows, ctx.widths, strict=True)]
        means = all_reduce(torch.stack(parts), ctx.group)
        input_grads = (_input_gradient(*row, mean) for row, mean in zip(rows, means, strict=True))
        return *input_grads, *(total.to(query_weight.dtype) for total in sums), None, None, None


def _scale_gradient(grad: Tensor, x: Tensor, inverse: Tensor) -> Tensor:
    """Return the gradient [A D] of a norm's scale, in float32."""
    return (at_least_float32(x) * inverse).mul_(grad).flatten(0, -2).sum(0)


def _projections(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    """Return the sum over a rank's elements of the normed x times the gradient of what is normed, [B, S, 1]."""
    return (at_least_float32(x) * inverse).mul_(grad).mul_(weight).sum(-1, keepdim=True)


def _input_gradient(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, mean: Tensor) -> Tensor:
    """Return the gradient [B, S, A D] of a norm's input, from the mean of `_projections` over all elements."""
    normed = (at_least_float32(x) * inverse).mul_(-mean)
    return normed.add_(at_least_float32(grad) * weight).mul_(inverse).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / its root mean square along the last dim, scaled by `weight`."""
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)  # one kernel, which saves the same as ours
    normed: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


def _inverse_root(wide: Tensor, eps: float) -> Tensor:
    """Return 1 / the root mean square [B, S, 1] of float32 hidden states [B, S, H]."""
    return torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


class _RMSNorm(torch.autograd.Function):
    """Saves x in its own dtype and one float32 per token; autograd of the formula would save x twice in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = at_least_float32(x)  # [B, S, H]
        inverse = _inverse_root(wide, eps)
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


def rms_norm_1p(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / its root mean square along the last dim, scaled by 1 + `weight`; rounded once."""
    normed: Tensor = _RMSNorm1p.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm1p(torch.autograd.Function):
    """Saves what `_RMSNorm` saves. torch's kernel would scale by 1 + a weight that is rounded to the weight's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = at_least_float32(x)  # [B, S, H]
        inverse = _inverse_root(wide, eps)
        ctx.save_for_backward(x, weight, inverse)
        return as_output((wide * inverse).mul_(1 + at_least_float32(weight)).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        scale = 1 + at_least_float32(weight)
        normed = at_least_float32(x) * inverse
        products = normed * grad
        weight_grad = products.flatten(0, -2).sum(0).to(weight.dtype)
        normed.mul_(products.mul_(scale).mean(-1, keepdim=True))
        del products  # of three tensors in float32 two are held together
        wide_grad = (scale * grad).sub_(normed)
        del normed
        return wide_grad.mul_(inverse).to(x.dtype), weight_grad, None


def make_norm(model: Model, parameters: Parameters) -> nn.Module:
    """Make the norm that `model.norm` names."""
    match model.norm:
        case "layernorm":
            return LayerNorm(parameters, model.norm_eps)
        case "rmsnorm":
            return RMSNorm(parameters, model.norm_eps)
        case "rmsnorm1p":
            return RMSNorm1p(parameters, model.norm_eps)
