"""What the loop looks at beside the loss: bytes by kind at one step, a profiler's window, the line that tells how far it is."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from ..engines.held_bytes import Count
from ..parallel.ledger import Ledger
from ..parallel.world import World
from ..spec.run import Run
from ..system.atomic_file import put

NOTICED = 0.2  # seconds between two live lines


def measured(count: Count, world: World, host: dist.ProcessGroup, folder: Path, facts: dict[str, Any]) -> str:
    """RUN_DIR/measured.json: `facts`, "memory": bytes by kind on the rank that has most of it, "ranks": [bytes by kind].

    Why it could not be written, else "".
    """
    ranks: list[Any] = [None] * world.size
    dist.all_gather_object(ranks, count.bytes, group=host)
    if not world.first:
        return ""
    most = {kind: max(each[kind] for each in ranks) for kind in ranks[0]}
    return _written(folder / "measured.json", {**facts, "memory": most, "ranks": ranks})


def messages(ledger: Ledger, world: World, host: dist.ProcessGroup, folder: Path, step: int) -> str:
    """RUN_DIR/ledger.json: "step", "ranks": [every message of that step by axis, verb and payload, and how many].

    Why it could not be written, else "".
    """
    ranks: list[Any] = [None] * world.size
    dist.all_gather_object(ranks, [asdict(row) for row in ledger.rows], group=host)
    return _written(folder / "ledger.json", {"step": step, "ranks": ranks}) if world.first else ""


def _written(file: Path, told: dict[str, Any]) -> str:
    """Write a file whole or not at all; why not, else ""."""
    try:
        put(file, f"{json.dumps(told, indent=1)}\n".encode())
    except OSError as error:
        return f"{file} could not be written: {error.strerror or error}"
    return ""


class Profile:
    """The window log.profile=[first, last] of steps, on rank 0: RUN_DIR/trace/steps_F_L.json, which Perfetto opens."""

    def __init__(self, run: Run, world: World, folder: Path) -> None:
        self.window = run.log.profile if world.first else None
        self.folder = folder / "trace"
        self._open: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """Step `step` (from 1) is about to begin."""
        if self.window and self.window[0] <= step <= self.window[1] and self._open is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._first = step
            self._open = torch.profiler.profile(activities=activities)
            self._open.start()

    def after(self, step: int, *, last: bool) -> str:
        """Step `step` is done; if this was the window's last, or the run's: a line that says where the trace was written, or why not."""
        if self._open is None or self.window is None or not (last or step >= self.window[1]):
            return ""
        profiled, self._open = self._open, None
        profiled.stop()
        file = self.folder / f"steps_{self._first}_{step}.json"
        try:
            self.folder.mkdir(exist_ok=True)
            profiled.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            return f"warning: the profiler's trace could not be written: {error}"
        if not file.is_file():  # where the disk is full it leaves a part under another name, and a line in the log
            file.with_name(f"{file.name}.tmp").unlink(missing_ok=True)
            return f"warning: the profiler's trace could not be written: {file}"
        return f"trace of the profiler, for ui.perfetto.dev: {file}"


class Pace:
    """The live line: how far a run is, how fast, and how long it will take."""

    def __init__(self, run: Run, steps: int, first: int) -> None:
        self.steps, self.first = steps, first
        self.tokens = run.train.batch * run.train.seq
        self._began = self._shown = perf_counter()

    def line(self, done: int, loss: float) -> str | None:
        """The line after so many steps, if it is time for another."""
        now = perf_counter()
        if now - self._shown < NOTICED:
            return None
        self._shown = now
        each = (now - self._began) / (done - self.first)
        left = round(each * (self.steps - done))
        clock = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}" if left >= 3600 else f"{left // 60}:{left % 60:02}"
        return f"step {done}/{self.steps}  loss {loss:.4f}  {self.tokens / each:,.0f} tokens/s  {clock} left"
