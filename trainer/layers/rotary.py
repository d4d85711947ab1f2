"""Rotary position embedding (arXiv:2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

from .float32 import at_least_float32

# B batch, S sequence, A heads, D head_dim


def rotary_angles(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> Tensor:
    """Return the cosines and sines of positions [S], in at least float32 for heads of `dtype`: [2, S, D/2]."""
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = base ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim)  # [D/2]
    angle = positions.to(wide)[:, None] * frequencies  # [S, D/2]
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate each pair (i, i + D/2) of each head of x [B, S, A, D] by its position's angle, in float32."""
    cos, sin = angles.unsqueeze(2).unbind(0)  # [S, 1, D/2]
    first, second = at_least_float32(x).chunk(2, dim=-1)  # [B, S, A, D/2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
