"""Trains our module and one of another program on the same batch, each with its own AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

STEPS, BATCH, TOKENS = 6, 4, 33


def losses_side_by_side(
    ours: Any, theirs: Any, parameters: Sequence[Sequence[torch.nn.Parameter]], lr: float, **further: Any
) -> list[list[float]]:
    """The losses of both in each step; `parameters` are those that each trains. The batch is the same in every step, and so are `further`
    arguments of our model."""
    steppers = [torch.optim.AdamW(side, lr=lr, eps=1e-3, weight_decay=0.0) for side in parameters]  # eps: rounding decides no step
    losses: list[list[float]] = [[], []]
    tokens = torch.randint(256, (BATCH, TOKENS), generator=torch.Generator().manual_seed(2))
    for _ in range(STEPS):
        total, count = ours(tokens[:, :-1], tokens[:, 1:], **further)
        mean = F.cross_entropy(theirs(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        for loss, stepper, told in zip((total / count, mean), steppers, losses, strict=True):
            loss.backward()
            told.append(loss.item())
            stepper.step()
            stepper.zero_grad()
    return losses
