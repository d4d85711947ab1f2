"""DeepSpeed's instructions for pipeline schedules: its own where it has some, and others derived from a schedule's actions.

DeepSpeed is imported with this module: import it after `import_deepspeed()` of import_deepspeed.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.pipe import schedule as ds

from ...plan.engines import ENGINES
from ...plan.layout.schedules import SCHEDULES
from ...plan.layout.stage_events import StageEvent, stage_events

Instructions = list[Any]
TIMED = {  # instructions that an engine times: the part of the step, the kind of span
    ds.SendActivation: ("messages", "send"),
    ds.RecvActivation: ("messages", "receive"),
    ds.SendGrad: ("messages", "send"),
    ds.RecvGrad: ("messages", "receive"),
    ds.ReduceGrads: ("sums", "sum"),
}
DEEPSPEED_SCHEDULES = {"1f1b": ds.TrainSchedule}  # schedules that DeepSpeed has
if hasattr(ds, "DualPipeVSchedule"):  # since release 0.19.8
    DEEPSPEED_SCHEDULES["dualpipev"] = ds.DualPipeVSchedule
    TIMED[ds.CommitP2P] = ("messages", "send")

INSTRUCTIONS = {
    ("compute", "F"): ds.ForwardPass,
    ("compute", "B"): ds.BackwardPass,
    ("send", "F"): ds.SendActivation,
    ("receive", "F"): ds.RecvActivation,
    ("send", "B"): ds.SendGrad,
    ("receive", "B"): ds.RecvGrad,
}


class ActionInstructions(ds.PipeSchedule):  # type: ignore[misc]
    """A stage's instructions for one optimizer step of a plain schedule, derived from its actions."""

    def __init__(self, name: str, micros: int, stages: int, stage: int) -> None:
        super().__init__(micros, stages, stage)
        self.events = stage_events(SCHEDULES[name].actions, stages, micros)[stage]
        self.buffers = _buffers(self.events)

    def steps(self) -> Iterator[Instructions]:
        for event in self.events:
            yield [INSTRUCTIONS[event.verb, event.kind](self.buffers[event.micro])]
        yield [ds.ReduceTiedGrads(), ds.ReduceGrads(), ds.OptimizerStep()]

    def num_pipe_buffers(self) -> int:
        """The most micro-batches that the stage holds at once."""
        return 1 + max(self.buffers.values())


class ForwardOnly(ds.PipeSchedule):  # type: ignore[misc]
    """One micro-batch forward through the stages. A stage may start the next one before the last stage has computed this one."""

    def __init__(self, stages: int, stage: int) -> None:
        super().__init__(1, stages, stage)

    def steps(self) -> Iterator[Instructions]:
        yield [] if self.is_first_stage else [ds.RecvActivation(0)]
        yield [ds.ForwardPass(0)]
        yield [] if self.is_last_stage else [ds.SendActivation(0)]


class FoldedForwardOnly(ds.PipeSchedule):  # type: ignore[misc]
    """One micro-batch forward, out through the stages and back through their second parts, where its buffer is `back`."""

    def __init__(self, stages: int, stage: int, back: int) -> None:
        super().__init__(1, stages, stage)
        self.back = back

    def steps(self) -> Iterator[Instructions]:
        for phase, buffer, first, last in (
            (0, 0, self.is_first_stage, self.is_last_stage),
            (1, self.back, self.is_last_stage, self.is_first_stage),
        ):
            yield [] if first else [ds.RecvActivation(buffer, phase=phase), ds.CommitP2P()]
            yield [ds.ForwardPass(buffer, phase=phase)]
            yield [] if last else [ds.SendActivation(buffer, phase=phase), ds.CommitP2P()]

    def num_pipe_buffers(self) -> int:
        return self.back + 1


def training_instructions(name: str, micros: int, stages: int, stage: int) -> Any:
    """The instructions of a stage for one optimizer step. Raises ValueError for a schedule that they cannot express."""
    if native := DEEPSPEED_SCHEDULES.get(name):
        return native(micros, stages, stage)
    if not SCHEDULES[name].is_plain:
        runs = ", ".join(ENGINES["pipe"].schedules)
        why = "it needs chunks, separate weight gradients or several versions of the weights"
        raise ValueError(f"engine pipe cannot run parallel.schedule={name}, because {why}: set it to one of {runs}")
    if any(micro != at for at, micro in enumerate(action.micro for action in _forwards(name, micros, stages, stage))):
        raise ValueError(f"engine pipe runs forwards in the order of micro-batches, and parallel.schedule={name} does not")
    return ActionInstructions(name, micros, stages, stage)


def _forwards(name: str, micros: int, stages: int, stage: int) -> Iterator[Any]:
    return (action for action in SCHEDULES[name].actions(stage, stages, micros, 1) if action.kind == "F")


def _buffers(events: tuple[StageEvent, ...]) -> dict[int, int]:
    """The buffer of each micro-batch: the lowest that is free from its first event to its last."""
    last = {event.micro: at for at, event in enumerate(events)}
    buffers: dict[int, int] = {}
    used: set[int] = set()
    for at, event in enumerate(events):
        if event.micro not in buffers:
            buffers[event.micro] = next(each for each in range(len(used) + 1) if each not in used)
            used.add(buffers[event.micro])
        if last[event.micro] == at:
            used.remove(buffers[event.micro])
    return buffers
