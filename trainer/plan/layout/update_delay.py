"""Pipelines without a flush: which version of its weights a micro-batch meets on a stage, and when the stage updates them.

Micro-batches, updates and versions are numbered from the last flush on. Version v of a stage's weights has had v updates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Delay:
    """How late a schedule without a flush updates weights: after each micro-batch (arXiv:1806.03377), or once a step (arXiv:2006.09503).

    The gradient of update u is computed with the weights of version u - `late`, in forward and in backward.
    """

    late: Callable[[int, int], int]
    """(stage, p) -> the updates that are missing from the weights with which a gradient is computed."""
    each_micro_batch: bool

    def updates(self, micros: int) -> int:
        """The updates of a step of so many micro-batches."""
        return micros if self.each_micro_batch else 1

    def update_of(self, micro: int, micros: int) -> int:
        """The update that a micro-batch's gradient is a part of, in steps of `micros`."""
        return micro if self.each_micro_batch else micro // micros

    def version(self, stage: int, stages: int, micro: int, micros: int) -> int:
        """The version of a stage's weights that a micro-batch meets; right after a flush, the first ones."""
        return max(0, self.update_of(micro, micros) - self.late(stage, stages))

    def versions_held(self, stage: int, stages: int) -> int:
        """The most versions that a stage holds at once: that of the oldest micro-batch whose backward is to come, and all later ones."""
        return self.late(stage, stages) + 1

    def steps_late(self, stages: int, micros: int) -> int:
        """The steps by which the first stage's last update of a step comes after that step's last forward."""
        return -(-(stages - 1) // micros)
