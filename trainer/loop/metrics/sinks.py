"""Sinks of a run's metrics: metrics.jsonl, which every run has, and others, whose failures do not stop training."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from shlex import quote
from typing import Any, Protocol

import msgspec

from ...plan.plan_data import Plan
from ...rundir.metric_rows import is_step_row, validation_key
from ...spec.read import value_text
from ...spec.run import Run
from ...system.atomic_file import append_line, write_atomically
from .sink_thread import SinkThread
from .step_row import Row, console_line, finite_or_none

METRICS = "jsonl"  # the sink that every run has
MAX_ROW_BYTES = 1 << 16
MAX_WAITING_ROWS = 100_000  # the newest rows, kept in memory until the disk has room
WANDB = "wandb.json"  # in RUN_DIR: {"id", "project", "entity", "group"} of the wandb run that all attempts of this run write to
PLAN_KEYS = ("world", "mesh", "engine", "schedule", "microbatches", "model", "time", "bubble_fraction", "throughput", "run")
TABLE_SECTIONS = ("model", "parallel", "train", "optim", "data", "plan")  # of the config, shown in TensorBoard's table of runs
TABLE_CURVES = ("loss", validation_key(), "grad_norm", "tokens_per_second")  # metrics of that table, beside those of validation sets


@dataclass(frozen=True, kw_only=True)
class SinkContext:
    """What a sink is opened with."""

    run: Run
    plan: Plan
    folder: Path
    first: int  # the step of the checkpoint that training resumed from, or 0
    last: int  # the run's last step
    say: Callable[[str], None]  # shows the user a line

    def config(self) -> dict[str, Any]:
        """Return the run as nested plain data, with the plan's figures under `plan`, and without the shapes of a Hugging Face model."""
        config: dict[str, Any] = msgspec.to_builtins(self.run)
        config["model"].pop("parameters", None)
        planned = msgspec.to_builtins(self.plan)
        figures = {key: planned[key] for key in PLAN_KEYS}
        memory = {key: planned["memory"][key] for key in ("peak", "capacity")} if planned["memory"] else None
        return {**config, "plan": {**figures, "memory": memory}}


class Sink(Protocol):
    """Receives the metrics of a run."""

    def write(self, row: Row) -> None:
        """Write a logged step, or a row of what happened after one: it has a `step` too."""

    def close(self, summary: Row) -> None:
        """Write what is left, and the summary: planned figures next to the last measured ones."""


class JsonLines:
    """metrics.jsonl: one JSON object a line, each written whole and at once. Rows that a full disk rejects are written later."""

    def __init__(self, context: SinkContext) -> None:
        self._path = context.folder / "metrics.jsonl"
        self._fd: int | None = None
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING_ROWS)
        with suppress(OSError):  # rows wait for a file that can't be created, too
            self._open()

    def write(self, row: Row) -> None:
        """Write a row, after those that wait. NaN and infinities become null."""
        finite = {key: finite_or_none(value) if isinstance(value, float) else value for key, value in row.items()}
        self._waiting.append((json.dumps(finite) + "\n").encode())
        self._write()

    def close(self, summary: Row) -> None:
        """Try to write the rows that wait, and close the file. The summary is in plan.json and the rows already."""
        try:
            self._write()
        finally:
            if self._fd is not None:
                os.close(self._fd)

    def _write(self) -> None:
        while self._waiting:
            append_line(self._open(), self._waiting[0])
            self._waiting.popleft()

    def _open(self) -> int:
        if self._fd is not None and _is_gone(self._path, self._fd):
            os.close(self._fd)
            self._fd = None
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            _truncate_half_line(self._fd)
        return self._fd


def _is_gone(path: Path, fd: int) -> bool:
    """Whether an open file has lost its path: it was removed, or replaced by another."""
    try:
        return not os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _truncate_half_line(fd: int) -> None:
    """Remove the incomplete last line that a killed process left."""
    end = os.fstat(fd).st_size
    start = max(0, end - MAX_ROW_BYTES)
    complete = os.pread(fd, MAX_ROW_BYTES, start).rfind(b"\n") + 1
    if complete or start == 0:
        os.ftruncate(fd, start + complete)


class Wandb:
    """Weights & Biases, offline unless WANDB_MODE is set; all attempts of a run folder write to one wandb run.

    wandb drops a row whose step is not above the last one's, and a resumed attempt may start at an earlier step. So wandb numbers
    rows as they come, and `step` is the x axis: no row is lost, and of a step that is run twice the later row counts.
    """

    def __init__(self, context: SinkContext) -> None:
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_SILENT", "true")
        if os.environ["WANDB_MODE"] == "offline":
            os.environ.pop("WANDB_API_KEY", None)  # not needed offline, and WANDB_DEBUG would write it into RUN_DIR
        import wandb

        file = context.folder / WANDB
        saved = _saved_wandb_run(file, context.say)
        settings = {
            "id": ("WANDB_RUN_ID", saved.get("id") or token_hex(5)),
            "project": ("WANDB_PROJECT", saved.get("project") or "distrain"),
            "entity": ("WANDB_ENTITY", saved.get("entity")),
            "name": ("WANDB_NAME", context.run.name),
            "group": ("WANDB_RUN_GROUP", saved.get("group")),
            "dir": ("WANDB_DIR", str(context.folder)),
            "resume": ("WANDB_RESUME", "allow"),
        }
        ours = {key: value for key, (variable, value) in settings.items() if not os.environ.get(variable)}
        self.run = wandb.init(**ours, config=context.config())  # type: ignore[arg-type]
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        if self.run.disabled:
            return
        current = {"id": self.run.id, "project": self.run.project, "entity": self.run.entity or None, "group": self.run.group or None}
        if current != saved:
            with suppress(OSError):  # metrics.jsonl warns of a full disk
                write_atomically(file, f"{json.dumps(current)}\n".encode())
        folder = f"{quote(str(Path(self.run.dir).parents[1]))}/offline-run-*-{self.run.id}"
        context.say(f"wandb run {self.run.project}/{self.run.id}: " + (self.run.url or f"offline; `wandb sync {folder}` uploads it"))

    def write(self, row: Row) -> None:
        """Log a row; None values are left out."""
        self.run.log({key: value for key, value in row.items() if value is not None})

    def close(self, summary: Row) -> None:
        """Add the planned figures to the wandb run's summary, and finish it."""
        self.run.summary.update(dict(summary))
        self.run.finish()


def _saved_wandb_run(file: Path, say: Callable[[str], None]) -> dict[str, str | None]:
    """Return RUN_DIR/wandb.json, or nothing, with a warning where it can't be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, str | None])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError):
        say(f"warning: {file} can't be read: this attempt starts a new wandb run")
        return {}


class Tensorboard:
    """TensorBoard event files in RUN_DIR/tensorboard: scalars, the run's config as a text, and a row in the table of runs (HPARAMS).

    A resumed attempt replaces the steps that an earlier one took beyond the checkpoint. The table shows the config of the folder's
    first attempt (TensorBoard reads that of a run once); the text has a page for each attempt.
    """

    def __init__(self, context: SinkContext) -> None:
        tensorboard: Any = import_module("torch.utils.tensorboard")
        self.writer = tensorboard.SummaryWriter(str(context.folder / "tensorboard"), purge_step=context.first + 1)
        config = dict(flat_items(context.config()))
        lines = "".join(f"    {key}={value_text(value)}\n" for key, value in config.items())
        self.writer.add_text("run", lines, context.first)
        table = {
            key: value_text(value) if isinstance(value, bool) else value
            for key, value in config.items()
            if key.split(".")[0] in TABLE_SECTIONS and isinstance(value, str | int | float)
        }
        curves = (*TABLE_CURVES, *map(validation_key, context.run.data.validate or ()))
        experiment, session_start, _ = tensorboard.summary.hparams(table, dict.fromkeys(curves))
        for summary in (experiment, session_start):
            self.writer.file_writer.add_summary(summary)

    def write(self, row: Row) -> None:
        """Write a row's numbers."""
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                self.writer.add_scalar(key, value, row["step"])

    def close(self, summary: Row) -> None:
        """Flush what is left."""
        self.writer.close()


class Console:
    """A line for each row, shown to the user."""

    def __init__(self, context: SinkContext) -> None:
        self.context = context

    def write(self, row: Row) -> None:
        """Show a logged step; slow devices and saves have lines of their own."""
        if is_step_row(row):
            self.context.say(console_line(row, self.context.last))

    def close(self, summary: Row) -> None:
        """Do nothing: every row has been shown."""


def flat_items(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested plain data as (dotted key, value); a list is one value."""
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from flat_items(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


SINKS: dict[str, Callable[[SinkContext], Sink]] = {
    "jsonl": JsonLines,
    "wandb": Wandb,
    "tensorboard": Tensorboard,
    "console": Console,
}
THREADED = ("wandb", "tensorboard")  # of third parties


class Sinks:
    """All sinks of a run. One that fails is dropped with a warning; metrics.jsonl is tried again with each row and at the end."""

    def __init__(self, context: SinkContext, on_wait: Callable[[], object] = lambda: None) -> None:
        """`on_wait` is called while one takes long to open."""
        self._say = context.say
        self._open: dict[str, Sink] = {}
        self._failing: set[str] = set()  # those that do not work, of which the user was warned
        for name, sink in SINKS.items():
            if name == METRICS or name in context.run.log.sinks:
                with self._guard(name):
                    self._open[name] = SinkThread(name, partial(sink, context), on_wait=on_wait) if name in THREADED else sink(context)

    def write(self, row: Row) -> None:
        """Write a logged step to each sink."""
        for name, sink in list(self._open.items()):
            with self._guard(name):
                sink.write(row)

    def close(self, summary: Row, on_wait: Callable[[], object] = lambda: None) -> None:
        """Close each sink; `on_wait` is called while one takes long."""
        self._failing.discard(METRICS)  # lost rows are a second warning, after the one of waiting rows
        for name, sink in list(self._open.items()):
            with self._guard(name, rows="its last rows are lost"):
                if isinstance(sink, SinkThread):
                    sink.close(summary, on_wait)
                else:
                    sink.close(summary)

    @contextmanager
    def _guard(self, name: str, rows: str = "its rows wait for room") -> Iterator[None]:
        """Turn any exception of a sink, which runs third-party code, into one warning."""
        try:
            yield
        except Exception as error:
            if name != METRICS:
                self._open.pop(name, None)
            if name not in self._failing:
                self._failing.add(name)
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                what = f"metrics.jsonl: {reason}; {rows}" if name == METRICS else f"log sink {name} stopped: {reason}"
                self._say(f"warning: {what}")
        else:
            self._failing.discard(name)
