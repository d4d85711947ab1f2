"""The learning-rate schedules."""

from __future__ import annotations

from math import cos, pi
from typing import assert_never

from .optimizer import Optim

DECAY_SHARE = 0.2  # of the steps of a warm-up, stable, decay (WSD) schedule (arXiv:2405.18392)


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """Return the learning rate of step 0 <= step < steps: linear warm-up, then the schedule from lr down to min_lr."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    done = (step - optim.warmup) / max(1, steps - optim.warmup)
    return optim.min_lr + (optim.lr - optim.min_lr) * _schedule_share(optim, done)


def _schedule_share(optim: Optim, done: float) -> float:
    """Return where the rate is between min_lr (0) and lr (1) after the share `done` of the steps that follow warm-up."""
    match optim.schedule:
        case "cosine":
            return 0.5 * (1 + cos(pi * min(1.0, done)))
        case "linear":
            return max(0.0, 1 - done)
        case "wsd":
            return min(1.0, max(0.0, 1 - done) / DECAY_SHARE)
        case "constant":
            return 1.0
        case _:
            assert_never(optim.schedule)
