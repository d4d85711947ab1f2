"""Matrix products in 8-bit floats: inputs and weights in e4m3, gradients of outputs in e5m2 (arXiv:2209.05433 section 3).

A tensor is cast with one scale, from its own largest element. Scales are powers of two. An element then rounds alike under any scale, but
for the smallest ones, and layouts train the same curve though their ranks scale other parts of a tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .weight_gradients import WeightGradients, open_weight_gradients

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2  # of inputs and weights, of gradients of outputs
OUTPUT = torch.bfloat16  # of products, as all that is not one computes in
MIN_SCALE = 2.0**-126  # the smallest normal float32
EXPONENT, MANTISSA = 0x7F800000, 0x7FFFFF  # bits of a float32

# R rows, I inner, O outer


class Scaled(NamedTuple):
    """A tensor as 8-bit floats times a scale."""

    values: Tensor
    scale: Tensor  # float32, of no dims

    @property
    def mT(self) -> Scaled:
        """The transposed matrix."""
        return Scaled(self.values.mT, self.scale)

    @property
    def rows(self) -> Scaled:
        """This tensor [..., I] as a matrix [R, I]."""
        return Scaled(self.values.flatten(0, -2), self.scale)


def cast(x: Tensor, dtype: torch.dtype, *, after: Tensor | None = None) -> Scaled:
    """Cast x to 8-bit floats: by the smallest power of two under which its largest element does not overflow.

    In a compiled graph it is cast `after` that number is known. The compiler would else cast a weight in forward, and keep it for backward.
    """
    largest = torch.linalg.vector_norm(x.detach(), float("inf")).float()
    least = (largest / torch.finfo(dtype).max).clamp(min=MIN_SCALE)
    scale = ((least.view(torch.int32) + MANTISSA) & EXPONENT).view(torch.float32)  # rounded up to a power of two
    if after is not None and torch.compiler.is_compiling():
        scale = scale + 0.0 * after
    return Scaled((x.detach() * scale.reciprocal().to(x.dtype)).to(dtype), scale)


def scaled_product(a: Scaled, b: Scaled) -> Tensor:
    """Return a b in bf16, for a [M, K] and b [K, N]; on GPUs M, K and N are multiples of 16.

    A GPU's kernel wants a by rows and b by columns. A CPU has no fast one: there 8-bit values are multiplied in bf16, which holds them
    exactly, as well as a scale that is a power of two.
    """
    if not a.values.is_cuda:
        product: Tensor = a.values.to(OUTPUT) @ b.values.to(OUTPUT)
        return product * (a.scale * b.scale).to(OUTPUT)
    by_rows, by_columns = a.values.contiguous(), b.values.mT.contiguous().mT
    quick = a.values.dtype == FORWARD and b.values.dtype == FORWARD  # sums with fewer bits, which gradients would feel
    # torch.nn.functional.scaled_mm breaks graphs of torch 2.11, whose compiler does not know the operator that it calls.
    return torch._scaled_mm(by_rows, by_columns, a.scale, b.scale, out_dtype=OUTPUT, use_fast_accum=quick)


def fp8_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, shared: Scaled | None = None) -> Tensor:
    """Return x W + b in 8-bit floats for x [..., I] and weight [I, O]; its weight's gradient may be deferred. `shared`: x as another layer
    cast it. Backward keeps the cast input, and casts the weight again."""
    values, scale = shared or cast(x, FORWARD)
    if not torch.is_grad_enabled():  # a compiled evaluation can't trace the function
        return fp8_affine(Scaled(values, scale), weight, bias)
    gradients = open_weight_gradients(weight)
    output: Tensor = _Fp8Product.apply(x, values, scale, weight, bias, gradients)  # type: ignore[no-untyped-call]
    return output


def fp8_affine(x: Scaled, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W + b for x [..., I] and weight [I, O]."""
    product = scaled_product(x.rows, cast(weight, FORWARD))
    # No view for autograd: g sums it in place.
    output: Tensor = torch.ops.aten._unsafe_view(product, [*x.values.shape[:-1], weight.shape[1]])
    return output if bias is None else output + bias


def fp8_input_gradient(grad: Scaled, weight: Tensor) -> Tensor:
    """Return the gradient [R, I] of a product's input, from that of its output [R, O]."""
    return scaled_product(grad, cast(weight, FORWARD, after=grad.scale).mT)


class _Fp8Product(torch.autograd.Function):
    """Saves the cast input and the parameter itself; x is here for its gradient alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, gradients: WeightGradients | None
    ) -> Tensor:
        ctx.save_for_backward(values, scale, weight)
        ctx.gradients, ctx.has_bias = gradients, bias is not None
        ctx.parameter = weight if gradients is not None else None  # what backward unpacks may be another tensor of the same memory
        return fp8_affine(Scaled(values, scale), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, scale, weight = ctx.saved_tensors
        rows, inputs = grad.flatten(0, -2), Scaled(values, scale).rows
        row_grads = cast(rows, BACKWARD)
        x_grad = fp8_input_gradient(row_grads, weight).view(*grad.shape[:-1], -1) if ctx.needs_input_grad[0] else None
        bias_grad = rows.sum(0) if ctx.has_bias else None
        if ctx.gradients is not None:
            ctx.gradients.defer([ctx.parameter], lambda: [scaled_product(inputs.mT, row_grads)], [*inputs, *row_grads])
            return x_grad, None, None, None, bias_grad, None
        return x_grad, None, None, scaled_product(inputs.mT, row_grads), bias_grad, None
