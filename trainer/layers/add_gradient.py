"""A loss that trains beside another one, and is not seen in its value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def add_gradient(out: Tensor, further_loss: Tensor, loss_gradient: float | None = None) -> Tensor:
    """Return the loss, or a part's hidden states, unchanged; backward also gives the further loss the gradient of the loss, or
    `loss_gradient` where that is not None."""
    unchanged: Tensor = _AddGradient.apply(out, further_loss, loss_gradient)  # type: ignore[no-untyped-call]
    return unchanged


class _AddGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, further_loss: Tensor, loss_gradient: float | None) -> Tensor:
        ctx.loss_gradient, ctx.dtype = loss_gradient, further_loss.dtype
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        given = ctx.loss_gradient
        further_grad = grad.to(ctx.dtype) if given is None else grad.new_full((), given, dtype=ctx.dtype)
        return grad, further_grad, None
