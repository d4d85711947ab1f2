"""Attempts at a run whose ranks are small programs without torch, and the checkpoints that they find."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Timer

from distrain.cli.config.load import load_recipe
from distrain.trainer.launch.restart import run_attempts
from distrain.trainer.launch.supervisor.outcome import Outcome
from distrain.trainer.launch.supervisor.supervisor import ECHO
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.rundir.checkpoints import seal
from distrain.trainer.spec.run import Run

WORDS = (
    "model=tiny", "model.layers=2", "data=synthetic", "train.batch=12", "train.seq=16", "train.microbatch=1", "train.steps=9",
    "optim.warmup=0", "name=run",
)  # fmt: skip


@cache
def attempt_run(*words: str) -> Run:
    return load_recipe("quickstart", [*WORDS, *words])


@dataclass
class Attempts:
    """A run of two ranks in a folder of its own, and the lines that it prints."""

    folder: Path
    lines: list[str] = field(default_factory=list)
    signals: dict[str, int] = field(default_factory=dict)  # sent to this process once a line with that text is printed

    def __post_init__(self) -> None:
        self.folder.mkdir()

    def show(self, line: str) -> None:
        self.lines.append(line)
        for text, number in self.signals.items():
            if text not in line:
                continue
            if number == signal.SIGINT:  # a second one that is too early counts as a copy of the first
                Timer(2 * ECHO, os.kill, (os.getpid(), number)).start()
            else:
                os.kill(os.getpid(), number)

    def run(self, program: str, restarts: int = 1, *words: str) -> Outcome:
        run = attempt_run("cluster=1x2", f"launch.restarts={restarts}", *words)
        command = [sys.executable, "-c", program, str(self.folder)]
        return run_attempts(run, make_plan(run), (), self.folder, self.show, self.show, command=command)

    @property
    def summary(self) -> str:
        return "\n".join(self.lines)


def write_checkpoint(folder: Path, step: int) -> None:
    """Write a checkpoint of one file."""
    path = folder / "checkpoints" / f"step_{step}"
    path.mkdir(parents=True)
    (path / "weight").write_bytes(b"xyz")
    said = json.dumps({"step": step, "extra": {}, "files": {"weight": {"bytes": 3}}, "tensors": []})
    (path / "manifest.json").write_bytes(seal(said.removeprefix("{").encode()))
