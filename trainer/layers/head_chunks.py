"""Sequences of tokens, by the heads of their keys and in chunks of equal length, and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# B batch, S sequence, K key heads, R value heads of each, V width of a value, N chunks, L tokens of a chunk


def by_key_head(x: Tensor, heads: int, value_heads: int) -> Tensor:
    """Return x [B, S, K R ...] as [B, S, K, R, ...]."""
    return torch.unflatten(x, -1, (heads, value_heads // heads, -1))


def chunks(x: Tensor, chunk: int) -> Tensor:
    """Return x [B, S, K, R, ...] in chunks, [B, K, R, N, L, ...]; behind the sequence there are zeros."""
    if missing := -x.shape[1] % chunk:  # torch copies what it pads by nothing
        x = F.pad(x, (0, 0, 0, 0, 0, 0, 0, missing))
    return torch.unflatten(x, 1, (-1, chunk)).permute(0, 3, 4, 1, 2, 5).contiguous()


def from_chunks(x: Tensor, seq: int) -> Tensor:
    """Return x [B, K, R, N, L, V] as [B, S, K R V], without what is behind the sequence, which would be saved with it."""
    rows = x.permute(0, 3, 4, 1, 2, 5).flatten(1, 2).flatten(2)
    return rows if rows.shape[1] == seq else rows[:, :seq].clone()
