"""Pipeline schedules as DeepSpeed's instructions: its own, and those that it does not have.

DeepSpeed is imported with this module: import it after `deepspeed()` of settings.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.pipe import schedule as ds

from ...plan.schedules import SCHEDULES, Action

Instructions = list[Any]
SENDS = (ds.SendActivation, ds.RecvActivation, ds.SendGrad, ds.RecvGrad, ds.CommitP2P)
SUMS = (ds.ReduceTiedGrads, ds.ReduceGrads)


class ForwardFirst(ds.PipeSchedule):  # type: ignore[misc]
    """A schedule with no backward before the last forward, from its actions (gpipe: arXiv:1811.06965).

    A send waits until it is received. No two stages wait for each other, since activations travel one way until all have
    arrived, and then gradients the other way, in one order for both ends of a link.
    """

    def __init__(self, name: str, micros: int, stages: int, stage: int) -> None:
        super().__init__(micros, stages, stage)
        self.actions = SCHEDULES[name].actions(stage, stages, micros, 1)

    def steps(self) -> Iterator[Instructions]:
        for action in self.actions:
            yield self._exchanged(action)
        yield [ds.ReduceTiedGrads(), ds.ReduceGrads(), ds.OptimizerStep()]

    def num_pipe_buffers(self) -> int:
        """One for each micro-batch: all are held before the first backward."""
        return int(self.micro_batches)

    def _exchanged(self, action: Action) -> Instructions:
        """An action between what it waits for and what it hands on."""
        micro, first, last = action.micro, self.is_first_stage, self.is_last_stage
        if action.kind == "F":
            before, compute, after = ds.RecvActivation(micro), ds.ForwardPass(micro), ds.SendActivation(micro)
        else:
            before, compute, after, first, last = ds.RecvGrad(micro), ds.BackwardPass(micro), ds.SendGrad(micro), last, first
        return [*([] if first else [before]), compute, *([] if last else [after])]


class Look(ds.PipeSchedule):  # type: ignore[misc]
    """One micro-batch forward through the stages. A stage may have its next one before the last stage has seen this."""

    def __init__(self, stages: int, stage: int) -> None:
        super().__init__(1, stages, stage)

    def steps(self) -> Iterator[Instructions]:
        yield [] if self.is_first_stage else [ds.RecvActivation(0)]
        yield [ds.ForwardPass(0)]
        yield [] if self.is_last_stage else [ds.SendActivation(0)]


class FoldedLook(ds.PipeSchedule):  # type: ignore[misc]
    """One micro-batch forward, out through the stages and back through their second parts; `there` is its buffer on the way back."""

    def __init__(self, stages: int, stage: int, there: int) -> None:
        super().__init__(1, stages, stage)
        self.there = there

    def steps(self) -> Iterator[Instructions]:
        for phase, buffer, first, last in (
            (0, 0, self.is_first_stage, self.is_last_stage),
            (1, self.there, self.is_last_stage, self.is_first_stage),
        ):
            yield [] if first else [ds.RecvActivation(buffer, phase=phase), ds.CommitP2P()]
            yield [ds.ForwardPass(buffer, phase=phase)]
            yield [] if last else [ds.SendActivation(buffer, phase=phase), ds.CommitP2P()]

    def num_pipe_buffers(self) -> int:
        return self.there + 1


def training(name: str, micros: int, stages: int, stage: int) -> Any:
    """The instructions of a stage for one optimizer step."""
    match name:
        case "1f1b":
            return ds.TrainSchedule(micros, stages, stage)
        case "dualpipev":
            return ds.DualPipeVSchedule(micros, stages, stage)
        case _ if SCHEDULES[name].forward_first:
            return ForwardFirst(name, micros, stages, stage)
    raise ValueError(f"engine pipe has no instructions for parallel.schedule={name}")
