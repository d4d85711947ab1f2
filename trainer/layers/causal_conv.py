"""A short causal convolution of each channel, inside documents."""

from __future__ import annotations

import torch
from torch import Tensor

from .dtypes import at_least_float32

# B batch, S sequence, C channels, W taps


def causal_conv(x: Tensor, taps: Tensor, starts: Tensor | None = None) -> Tensor:
    """Return each channel of x [B, S, C] convolved with its taps [W, C], the last of which is of the token itself, in at least float32.

    Where `starts` [B, S] say at which token each token's document starts, no tap reads a token of an earlier document.
    """
    wide, weights = at_least_float32(x), at_least_float32(taps)
    output = wide * weights[-1]
    for back in range(1, min(len(weights), x.shape[1])):
        output[:, back:].addcmul_(_of_document(wide[:, :-back], starts, back), weights[-1 - back])  # one kernel
    return output


def conv_gradients(grad: Tensor, x: Tensor, taps: Tensor, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [B, S, C] and of its taps [W, C], from that of what `causal_conv` returns."""
    wide, weights = at_least_float32(x), at_least_float32(taps)
    x_grad, taps_grad = grad * weights[-1], torch.zeros_like(weights)
    taps_grad[-1] = (grad * wide).sum((0, 1))
    for back in range(1, min(len(weights), x.shape[1])):
        reading = _of_document(grad[:, back:], starts, back)
        x_grad[:, :-back].addcmul_(reading, weights[-1 - back])
        taps_grad[-1 - back] = (reading * wide[:, :-back]).sum((0, 1))
    return x_grad.to(x.dtype), taps_grad.to(taps.dtype)


def _of_document(x: Tensor, starts: Tensor | None, back: int) -> Tensor:
    """Return x [B, S - back, C], which stands for pairs of a token and the one `back` before it, with 0 where these are of two
    documents."""
    if starts is None:
        return x
    earlier = torch.arange(x.shape[1], device=x.device)
    return x * (starts[:, back:] <= earlier).unsqueeze(-1)
