"""The squares of this rank's gradients, of which gradient norms are made."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .sharded_weights import ShardedWeight
from .weight_buckets import MASTER_DTYPE, WeightBucket


def counted_squares(buckets: Iterable[WeightBucket | ShardedWeight], device: torch.device) -> Tensor:
    """Return the sum of the squares of the gradients that this rank is the first to have, in float64."""
    pieces = [
        bucket.shard_gradient[offset : offset + length]
        for bucket in buckets
        for row, _, offset, length in bucket.pieces
        if row.is_counted and not (bucket.copies and bucket.copies.rank)
    ]
    if not pieces:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(pieces, dtype=MASTER_DTYPE)).double().square().sum().to(device)
