"""Where a run's figures go: metrics.jsonl, which is the truth, and sinks that may fail without stopping anything."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ..launch.whole import append
from ..spec.run import Run
from .poison import finite

ALWAYS = "jsonl"  # the sink that every run has
LONGEST = 1 << 16  # bytes of a row
WAITING = 100_000  # rows that wait for room, the last ones
Row = Mapping[str, Any]  # one logged step; `step` is a key of each


class Sink(Protocol):
    """Takes the rows of a run, then its summary."""

    def write(self, row: Row) -> None:
        """One logged step."""

    def close(self, summary: Row) -> None:
        """The run's end."""


class Lines:
    """metrics.jsonl: one object a line, each written at once and whole. What a full disk does not take waits for the next row."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self.file: int | None = None
        self.late: deque[bytes] = deque(maxlen=WAITING)
        with suppress(OSError):  # a file that can't be made waits too
            self._opened()

    def write(self, row: Row) -> None:
        """One line, after those that could not be written before; what JSON has no word for is null."""
        figures = {key: finite(value) if isinstance(value, float) else value for key, value in row.items()}
        self.late.append((json.dumps(figures) + "\n").encode())
        self._write()

    def close(self, summary: Row) -> None:
        """What still waits, once more, and the file's end: a summary stands in plan.json and the rows."""
        try:
            self._write()
        finally:
            if self.file is not None:
                os.close(self.file)

    def _write(self) -> None:
        while self.late:
            append(self._opened(), self.late[0])
            self.late.popleft()

    def _opened(self) -> int:
        if self.file is None:
            self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            _mend(self.file)
        return self.file


def _mend(file: int) -> None:
    """Take off the half line that a writer which was killed left at the end."""
    end = os.fstat(file).st_size
    start = max(0, end - LONGEST)
    whole = os.pread(file, LONGEST, start).rfind(b"\n") + 1
    if whole or start == 0:
        os.ftruncate(file, start + whole)


class Wandb:
    """Weights & Biases, offline unless WANDB_MODE says otherwise."""

    def __init__(self, run: Run, folder: Path) -> None:
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_SILENT", "true")
        if os.environ["WANDB_MODE"] == "offline":
            os.environ.pop("WANDB_API_KEY", None)  # nothing is sent, and under WANDB_DEBUG it would write the key into RUN_DIR
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
    """All of a run's sinks. One that fails is said once and left; metrics.jsonl is tried again with each row, and at the end."""

    def __init__(self, run: Run, folder: Path, say: Callable[[str], None]) -> None:
        self.say = say
        self.open: dict[str, Sink] = {}
        self.failed: set[str] = set()
        names = [ALWAYS, *(name for name in run.log.sinks if name in SINKS and name != ALWAYS)]
        for name in names:
            self._try(name, lambda name=name: self.open.__setitem__(name, SINKS[name](run, folder)))  # type: ignore[misc]

    def write(self, row: Row) -> None:
        """A logged step to each."""
        for name in list(self.open):
            self._try(name, lambda name=name: self.open[name].write(row))  # type: ignore[misc]

    def close(self, summary: Row) -> None:
        """The run's end to each."""
        self.failed.discard(ALWAYS)  # that rows are lost is another matter than that they wait
        for name in list(self.open):
            self._try(name, lambda name=name: self.open[name].close(summary), "its last rows are lost")  # type: ignore[misc]

    def _try(self, name: str, act: Callable[[], None], always: str = "its rows wait for room") -> None:
        try:
            act()
        except Exception as error:  # a sink is somebody else's service
            if name != ALWAYS:
                self.open.pop(name, None)
            if name not in self.failed:
                self.failed.add(name)
                why = str(error).splitlines()[0] if str(error) else type(error).__name__
                self.say(f"warning: metrics.jsonl: {why}; {always}" if name == ALWAYS else f"warning: log sink {name} stopped: {why}")
        else:
            self.failed.discard(name)
