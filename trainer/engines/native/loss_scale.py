"""The dynamic loss scale of fp16 (arXiv:1710.03740 section 3.2)."""

from __future__ import annotations

FIRST, LEAST, WINDOW, FACTOR = 2.0**16, 1.0, 1000, 2.0  # scales; steps without overflow after which it grows; by which it changes
PATIENCE = 2  # overflows in a row after which it shrinks


class LossScale:
    """The factor of the loss before backward: it shrinks where gradients overflow, and grows while they don't. Its numbers are named as
    in DeepSpeed's, so that checkpoints of one engine resume on the other."""

    def __init__(self) -> None:
        self.cur_scale = FIRST
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.cur_hysteresis = PATIENCE

    def update(self, *, overflow: bool) -> None:
        """Take note of a step."""
        if overflow:
            if self.cur_hysteresis <= 1:
                self.cur_scale = max(self.cur_scale / FACTOR, LEAST)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        elif (stable := self.cur_iter - self.last_overflow_iter - 1) > 0 and stable % WINDOW == 0:
            self.cur_hysteresis = PATIENCE
            self.cur_scale *= FACTOR
        self.cur_iter += 1
