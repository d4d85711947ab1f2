"""Weight gradients that a backward pass defers: zero-bubble schedules compute them later (arXiv:2401.10241 section 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Products = Callable[[], Sequence[Tensor]]

_open: WeightGradients | None = None


class WeightGradients:
    """The products of one backward pass that give weights' gradients. `add` takes each gradient when it is computed."""

    def __init__(self, add: Callable[[nn.Parameter, Tensor], None]) -> None:
        self._add = add
        self._deferred: list[tuple[Sequence[nn.Parameter], Products, Sequence[Tensor]]] = []

    def defer(self, weights: Sequence[nn.Parameter], products: Products, held: Sequence[Tensor]) -> None:
        """Keep what computes the gradients of weights; it holds the tensors `held`."""
        self._deferred.append((weights, products, held))

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield what the products that wait hold."""
        for _, _, held in self._deferred:
            yield from held

    @torch.no_grad()
    def compute(self) -> None:
        """Compute all gradients that were deferred, in the order of backward, and free what they needed."""
        waiting, self._deferred = self._deferred[::-1], []
        while waiting:
            weights, products, _ = waiting.pop()
            for weight, gradient in zip(weights, products(), strict=True):
                self._add(weight, gradient)


@contextmanager
def defer_weight_gradients(gradients: WeightGradients | None) -> Iterator[None]:
    """Have the layers whose forward runs in the block defer their weights' gradients; None: backward computes them."""
    global _open
    before, _open = _open, gradients
    try:
        yield
    finally:
        _open = before


def open_weight_gradients(*weights: Tensor) -> WeightGradients | None:
    """Return where gradients of these weights are to be deferred; None where backward computes them, or they have none."""
    return _open if _open is not None and all(each.requires_grad for each in weights) else None


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
    """Return x W + b for x [..., I] and weight [I, O] (transposed: [O, I]); its weight's gradient may be deferred."""
    gradients = open_weight_gradients(weight) if torch.is_grad_enabled() else None
    if gradients is not None:
        output: Tensor = _DeferredProduct.apply(x, weight, bias, transposed, gradients)  # type: ignore[no-untyped-call]
        return output
    return _affine(x, weight.mT if transposed else weight, bias)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return x @ weight
    return torch.addmm(bias, x.flatten(0, -2), weight).view(*x.shape[:-1], -1)


class _DeferredProduct(torch.autograd.Function):
    """x W + b, whose backward computes the gradients of x and b, and defers that of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, gradients: WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.gradients, ctx.has_bias = transposed, gradients, bias is not None
        ctx.parameter = weight  # what backward unpacks may be another tensor of the same memory
        return _affine(x, weight.mT if transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x = x.detach()  # else it holds the graph behind it until its product is computed, and so the stage's input
        transposed, row_grads = ctx.transposed, grad.flatten(0, -2)

        def weight_gradient() -> tuple[Tensor]:
            rows = x.flatten(0, -2)
            return (row_grads.mT @ rows if transposed else rows.mT @ row_grads,)

        ctx.gradients.defer([ctx.parameter], weight_gradient, [x, grad])
        x_grad = grad @ (weight if transposed else weight.mT) if ctx.needs_input_grad[0] else None
        return x_grad, None, row_grads.sum(0) if ctx.has_bias else None, None, None
