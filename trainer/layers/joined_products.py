"""Products of one input with several weights that lie one after another in memory, computed together in compiled graphs.

Weights [I, O] that lie one after another are a stack [N, I, O], not one wide matrix: their products are a batched one, with one batch for
each. Where it is the graph's compiler that makes the gradients of the outputs, it writes them side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# B batch, S sequence, N weights, R rows: B S, I inner, O outer


class WeightLayer(Protocol):
    """A layer with a weight."""

    weight: nn.Parameter


class JoinedWeights(nn.Module):
    """Where a module keeps the weights of layers that share its input, joined, once an engine has put them into one memory."""

    joined: Tensor | None = None  # [N, I, O], the last layer's weight first: a view of the weights' memory

    def column_layers(self) -> Sequence[WeightLayer]:
        """Return the layers that share the input, in their order."""
        raise NotImplementedError

    def joined_for(self, x: Tensor) -> Tensor | None:
        """Return the joined weights for an input x; None where each layer multiplies by itself: there are none, or no graph is compiled
        whose backward would gain by it."""
        is_traced = torch.compiler.is_compiling() and torch.is_grad_enabled()
        return self.joined if is_traced and self.joined is not None and self.joined.dtype == x.dtype else None


def joined_products(
    x: Tensor, joined: Tensor, weights: list[nn.Parameter], biases: list[nn.Parameter | None], *, keeps_all: bool
) -> tuple[Tensor, ...]:
    """Return x W + b for x [B, S, I] and each of the weights [I, O], which `joined` [N, I, O] holds in reverse order. All have a bias, or
    none.

    Backward computes all gradients of weights in one product, and the terms of the input's in another. `keeps_all`: backward needs all
    outputs, so forward too computes them in one: they share a memory, which is freed when none is needed. With biases it does not: a
    product with a bias is one kernel, and a batched one is not.
    """
    given = x, joined, keeps_all and biases[0] is None, *weights, *biases
    outputs: tuple[Tensor, ...] = _JoinedProducts.apply(*given)  # type: ignore[no-untyped-call]
    return outputs


class _JoinedProducts(torch.autograd.Function):
    """Saves the input and the joined weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, joined: Tensor, at_once: bool, *parameters: Any) -> tuple[Tensor, ...]:
        many, rows, shape = len(joined), x.flatten(0, -2), (*x.shape[:-1], joined.shape[-1])
        weights, biases = parameters[:many], parameters[many:]
        ctx.save_for_backward(x, joined)
        ctx.has_bias = biases[0] is not None
        if at_once:
            products = torch.bmm(rows.expand(many, *rows.shape), joined).unbind()
            return tuple(each.view(shape) for each in products[::-1])
        if not ctx.has_bias:
            return tuple((rows @ weight).view(shape) for weight in weights)
        return tuple(torch.addmm(bias, rows, weight).view(shape) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, joined = ctx.saved_tensors
        rows, outputs = x.flatten(0, -2), torch.stack([grad.flatten(0, -2) for grad in grads[::-1]])  # [R, I], [N, R, O]
        x_grad = torch.bmm(outputs, joined.mT).sum(0).view(x.shape) if ctx.needs_input_grad[0] else None
        weight_grads = torch.bmm(rows.mT.expand(len(grads), *rows.mT.shape), outputs).unbind()
        bias_grads = outputs.sum(1).unbind() if ctx.has_bias else [None] * len(grads)
        return x_grad, None, None, *weight_grads[::-1], *bias_grads[::-1]
