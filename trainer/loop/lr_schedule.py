"""The learning rate of a step."""

from __future__ import annotations

from math import cos, pi

from ..spec.run import Optim

DECAY = 0.2  # share of a warm-up, stable, decay run that decays (arXiv:2405.18392)


def rate(optim: Optim, step: int, steps: int) -> float:
    """The learning rate of step 0 <= step < steps: warm-up in a line, then the schedule from lr down to min_lr."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    done = (step - optim.warmup) / max(1, steps - optim.warmup)
    return optim.min_lr + (optim.lr - optim.min_lr) * _share(optim.schedule, done)


def _share(schedule: str, done: float) -> float:
    match schedule:
        case "cosine":
            return 0.5 * (1 + cos(pi * min(1.0, done)))
        case "linear":
            return max(0.0, 1 - done)
        case "wsd":
            return min(1.0, max(0.0, 1 - done) / DECAY)
        case _:
            return 1.0
