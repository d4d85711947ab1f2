"""Which tokens of a chunk are of one document, for linear attention in chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# B batch, S sequence, N chunks, L tokens of a chunk


@dataclass(frozen=True, kw_only=True)
class ChunkStarts:
    """Which tokens of chunks are of one document."""

    are_equal: Tensor  # [B, 1, 1, N, L, L]: of two tokens
    are_of_last: Tensor  # [B, 1, 1, N, L, 1]: of a token and the chunk's last
    are_earlier: Tensor  # [B, 1, 1, N, L, 1]: of a token and the last before the chunk


def chunk_starts(starts: Tensor, chunk: int) -> ChunkStarts:
    """Return which tokens of chunks are of one document, from where the document of each starts, [B, S]."""
    by_chunk = torch.unflatten(F.pad(starts, (0, -starts.shape[1] % chunk), value=starts.shape[1]), 1, (-1, chunk))[:, None, None]
    firsts = chunk * torch.arange(by_chunk.shape[3], device=starts.device)
    return ChunkStarts(
        are_equal=by_chunk.unsqueeze(-1) == by_chunk.unsqueeze(-2),
        are_of_last=(by_chunk == by_chunk[..., -1:]).unsqueeze(-1),
        are_earlier=(by_chunk < firsts[:, None]).unsqueeze(-1),
    )
