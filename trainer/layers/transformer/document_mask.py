"""The mask that keeps documents apart, for attention whose kernel does not take their bounds (document_attention.py)."""

from __future__ import annotations

import torch
from torch import Tensor

# B batch, S sequence


def document_starts(documents: Tensor) -> Tensor:
    """Return the position at which each token's document starts in its sequence, [B, S]."""
    positions = torch.arange(documents.shape[1], device=documents.device)  # [S]
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.cummax(torch.where(is_first, positions, 0), dim=1).values


def document_mask(starts: Tensor, positions: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """Return the mask of 0 and -inf, [B, 1, S, keys], under which a token sees itself and the earlier tokens of its document.

    The tokens are at `positions` [S]; their documents start at `starts` [B, S].
    """
    key_positions = torch.arange(keys, device=starts.device)
    is_seen = (positions[:, None] >= key_positions) & (starts[:, :, None] <= key_positions)  # [B, S, keys]
    return torch.zeros(is_seen.shape, dtype=dtype, device=starts.device).masked_fill_(~is_seen, -torch.inf).unsqueeze(1)
