"""Where a run's figures go: metrics.jsonl, which is the truth, and sinks that may fail without stopping anything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ..spec.run import Run

Row = Mapping[str, Any]  # one logged step; `step` is a key of each


class Sink(Protocol):
    """Takes the rows of a run, then its summary."""

    def write(self, row: Row) -> None:
        """One logged step."""

    def close(self, summary: Row) -> None:
        """The run's end."""


class Lines:
    """metrics.jsonl: one object a line, each written at once and whole."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.file = os.open(folder / "metrics.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, row: Row) -> None:
        """One line."""
        os.write(self.file, (json.dumps(row) + "\n").encode())

    def close(self, summary: Row) -> None:
        """Nothing but the file's end: a summary stands in plan.json and the rows."""
        os.close(self.file)


class Wandb:
    """Weights & Biases, offline unless WANDB_MODE says otherwise."""

    def __init__(self, run: Run, folder: Path) -> None:
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self.run = wandb.init(project="distrain", name=run.name, dir=str(folder), resume="allow")

    def write(self, row: Row) -> None:
        """One step."""
        self.run.log({key: value for key, value in row.items() if value is not None}, step=row["step"])

    def close(self, summary: Row) -> None:
        """The plan's figures beside the measured ones, in the run's summary."""
        self.run.summary.update(dict(summary))
        self.run.finish()


class Tensorboard:
    """TensorBoard event files in RUN_DIR/tensorboard."""

    def __init__(self, run: Run, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, row: Row) -> None:
        """One step: its numbers."""
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                self.writer.add_scalar(key, value, row["step"])

    def close(self, summary: Row) -> None:
        """Flush what is left."""
        self.writer.close()


SINKS: dict[str, Callable[[Run, Path], Sink]] = {
    "jsonl": Lines,
    "wandb": Wandb,
    "tensorboard": Tensorboard,
}


class Sinks:
    """All of a run's sinks. One that fails is said once and left; the lines of metrics.jsonl are always written."""

    def __init__(self, run: Run, folder: Path, say: Callable[[str], None]) -> None:
        self.say = say
        self.open: dict[str, Sink] = {}
        names = ["jsonl", *(name for name in run.log.sinks if name in SINKS and name != "jsonl")]
        for name in names:
            self._try(name, lambda name=name: self.open.__setitem__(name, SINKS[name](run, folder)))  # type: ignore[misc]

    def write(self, row: Row) -> None:
        """A logged step to each."""
        for name in list(self.open):
            self._try(name, lambda name=name: self.open[name].write(row))  # type: ignore[misc]

    def close(self, summary: Row) -> None:
        """The run's end to each."""
        for name in list(self.open):
            self._try(name, lambda name=name: self.open[name].close(summary))  # type: ignore[misc]

    def _try(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # a sink is somebody else's service
            self.open.pop(name, None)
            self.say(f"warning: log sink {name} stopped: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
