"""Computation in float32 where activations are in half precision."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or as it is where it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
