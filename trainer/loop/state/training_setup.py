"""The objects that the training loop uses on a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ...engines.engine import Engine
from ...launch.rank.channel import Channel
from ...parallel.process_groups import Grid
from ...parallel.world import World
from ...plan.plan_data import Plan
from ..data.samples.batches import Batches
from ..metrics.sinks import Sinks
from ..step.evaluate import Validation
from ..step.train_progress import TrainProgress


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """The plan, the data, the engine, and where messages, metrics and checkpoints go."""

    plan: Plan
    batches: Batches  # of the training split
    validations: tuple[Validation, ...]  # (): the run evaluates nothing
    engine: Engine
    grid: Grid
    channel: Channel
    start: TrainProgress  # step 0, or that of the checkpoint that was loaded
    recent: Mapping[str, Sequence[float]]  # figures of the steps before (failures/anomalies.py), if that checkpoint has them
    lacks_validation: bool  # whether that checkpoint lacks the validation of its step, which a stop request left out
    sinks: Sinks | None  # on rank 0
    folder: Path  # RUN_DIR
    host: dist.ProcessGroup  # gloo, for Python objects of all ranks

    @property
    def world(self) -> World:
        return self.grid.world

    def warn(self, problem: str) -> None:
        """Tell the user of a problem that does not stop training; "" is none."""
        if problem:
            self.channel.say(f"warning: {problem}; training continues")
