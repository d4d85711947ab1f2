"""The dynamic loss scale of fp16 (arXiv:1710.03740 section 3.2)."""

from __future__ import annotations

FIRST_SCALE, LEAST_SCALE = 2.0**16, 1.0
SCALE_FACTOR = 2.0  # by which it changes
GROWTH_INTERVAL = 1000  # steps without overflow after which it grows
PATIENCE = 2  # overflows in a row after which it shrinks


class LossScale:
    """The factor of the loss before backward: it shrinks where gradients overflow, and grows while they don't. Its numbers are named as
    in DeepSpeed's, so that checkpoints of one engine resume on the other."""

    def __init__(self) -> None:
        self.cur_scale = FIRST_SCALE
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.cur_hysteresis = PATIENCE

    def update(self, *, overflow: bool) -> None:
        """Take note of a step."""
        if overflow:
            if self.cur_hysteresis <= 1:
                self.cur_scale = max(self.cur_scale / SCALE_FACTOR, LEAST_SCALE)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        elif (stable := self.cur_iter - self.last_overflow_iter - 1) > 0 and stable % GROWTH_INTERVAL == 0:
            self.cur_hysteresis = PATIENCE
            self.cur_scale *= SCALE_FACTOR
        self.cur_iter += 1
