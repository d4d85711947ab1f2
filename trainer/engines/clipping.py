"""Clipping gradients by their global norm."""

from __future__ import annotations

from torch import Tensor

EPSILON = 1e-6  # beside the norm, as torch.nn.utils.clip_grad_norm_ has it


def clip_divisor(norm: Tensor, most: float) -> Tensor:
    """Return what gradients of this norm are divided by to clip them to a norm of `most`: at least 1."""
    return ((norm + EPSILON) / most).clamp_min(1.0)
