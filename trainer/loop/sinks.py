"""Where a run's figures go: metrics.jsonl, which is the truth, and sinks that may fail without stopping anything."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from shlex import quote
from typing import Any, Protocol

import msgspec

from ..plan.result import Plan
from ..spec.read import shown
from ..spec.run import Run
from ..system.atomic_file import append, put
from .anomalies import finite

ALWAYS = "jsonl"  # the sink that every run has
LONGEST = 1 << 16  # bytes of a row
WAITING = 100_000  # rows that wait for room, the last ones
WANDB = "wandb.json"  # of RUN_DIR: {"id", "project", "entity"} of the wandb run that all starts of the folder write to
PLANNED = ("world", "mesh", "engine", "schedule", "microbatches", "model", "time", "bubble_fraction", "throughput", "run")
COMPARED = ("model", "parallel", "train", "optim", "data", "plan")  # parts of the config that TensorBoard's table of runs shows
CURVES = ("loss", "validation_loss", "grad_norm", "tokens_per_second")  # and the figures beside them
Row = Mapping[str, Any]  # one logged step; `step` is a key of each


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a sink is opened with: the run, its plan and folder, the step of the checkpoint that it goes on from (0: it begins anew)."""

    run: Run
    plan: Plan
    folder: Path
    first: int
    say: Callable[[str], None]

    def config(self) -> dict[str, Any]:
        """The run as nested plain data, but for the table of shapes of a foreign model; the plan's figures are under `plan`."""
        words: dict[str, Any] = msgspec.to_builtins(self.run)
        words["model"].pop("parameters", None)
        planned = msgspec.to_builtins(self.plan)
        figures = {key: planned[key] for key in PLANNED}
        memory = {key: planned["memory"][key] for key in ("peak", "capacity")} if planned["memory"] else None
        return {**words, "plan": {**figures, "memory": memory}}


class Sink(Protocol):
    """Takes the rows of a run, then its summary."""

    def write(self, row: Row) -> None:
        """One logged step."""

    def close(self, summary: Row) -> None:
        """The run's end."""


class Lines:
    """metrics.jsonl: one object a line, each written at once and whole. What a full disk does not take waits for the next row."""

    def __init__(self, opening: Opening) -> None:
        self.path = opening.folder / "metrics.jsonl"
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
    """Weights & Biases, offline unless WANDB_MODE says otherwise; all starts of a run folder go to one run there.

    wandb drops a row whose step is not above the last one's, and a start goes on from a checkpoint that may lie behind it. So rows
    are numbered by wandb as they come, and `step` is the x axis: no row is lost, and the summary is that of a step's last pass.
    """

    def __init__(self, opening: Opening) -> None:
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_SILENT", "true")
        if os.environ["WANDB_MODE"] == "offline":
            os.environ.pop("WANDB_API_KEY", None)  # nothing is sent, and under WANDB_DEBUG it would write the key into RUN_DIR
        import wandb

        file = opening.folder / WANDB
        known = _known(file, opening.say)
        wanted = {
            "id": ("WANDB_RUN_ID", known.get("id") or token_hex(5)),
            "project": ("WANDB_PROJECT", known.get("project") or "distrain"),
            "entity": ("WANDB_ENTITY", known.get("entity")),
            "name": ("WANDB_NAME", opening.run.name),
            "dir": ("WANDB_DIR", str(opening.folder)),
            "resume": ("WANDB_RESUME", "allow"),
        }
        ours = {key: value for key, (variable, value) in wanted.items() if not os.environ.get(variable)}
        self.run = wandb.init(**ours, config=opening.config())  # type: ignore[arg-type]
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        if self.run.disabled:
            return
        now = {"id": self.run.id, "project": self.run.project, "entity": self.run.entity or None}
        if now != known:
            with suppress(OSError):  # where the disk is full metrics.jsonl says so
                put(file, f"{json.dumps(now)}\n".encode())
        kept = f"{quote(str(Path(self.run.dir).parents[1]))}/offline-run-*-{self.run.id}"
        opening.say(f"wandb run {self.run.project}/{self.run.id}: " + (self.run.url or f"offline; `wandb sync {kept}` uploads it"))

    def write(self, row: Row) -> None:
        """One step."""
        self.run.log({key: value for key, value in row.items() if value is not None})

    def close(self, summary: Row) -> None:
        """The plan's figures beside the measured ones, in the run's summary."""
        self.run.summary.update(dict(summary))
        self.run.finish()


def _known(file: Path, say: Callable[[str], None]) -> dict[str, str | None]:
    """What RUN_DIR/wandb.json says; nothing, and a warning, where it can't be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, str | None])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError):
        say(f"warning: {file} can't be read: this start is a run of its own at wandb")
        return {}


class Tensorboard:
    """TensorBoard event files in RUN_DIR/tensorboard: scalars, the run's words as a text, and a row in the table of runs (HPARAMS).

    A start replaces the steps that an earlier one took beyond its checkpoint. The table keeps the words of the folder's first start
    (TensorBoard reads a run's once); the text has a page for each start.
    """

    def __init__(self, opening: Opening) -> None:
        theirs: Any = import_module("torch.utils.tensorboard")
        self.writer = theirs.SummaryWriter(str(opening.folder / "tensorboard"), purge_step=opening.first + 1)
        words = dict(flat(opening.config()))
        lines = "".join(f"    {key}={shown(value)}\n" for key, value in words.items())
        self.writer.add_text("run", lines, opening.first)
        told = {key: value for key, value in words.items() if key.split(".")[0] in COMPARED and isinstance(value, str | int | float)}
        compared = {key: shown(value) if isinstance(value, bool) else value for key, value in told.items()}
        experiment, began, _ = theirs.summary.hparams(compared, dict.fromkeys(CURVES))
        for part in (experiment, began):
            self.writer.file_writer.add_summary(part)

    def write(self, row: Row) -> None:
        """One step: its numbers."""
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                self.writer.add_scalar(key, value, row["step"])

    def close(self, summary: Row) -> None:
        """Flush what is left."""
        self.writer.close()


def flat(words: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Nested plain data as (dotted key, value); a list is one value."""
    for key, value in words.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


SINKS: dict[str, Callable[[Opening], Sink]] = {
    "jsonl": Lines,
    "wandb": Wandb,
    "tensorboard": Tensorboard,
}


class Sinks:
    """All of a run's sinks. One that fails is said once and left; metrics.jsonl is tried again with each row, and at the end."""

    def __init__(self, opening: Opening) -> None:
        self.say = opening.say
        self.open: dict[str, Sink] = {}
        self.failed: set[str] = set()
        names = [ALWAYS, *(name for name in opening.run.log.sinks if name in SINKS and name != ALWAYS)]
        for name in names:
            self._try(name, lambda name=name: self.open.__setitem__(name, SINKS[name](opening)))  # type: ignore[misc]

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
