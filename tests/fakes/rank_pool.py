"""A pool of rank processes on a fork server, which multi-rank tests share: importing torch and DeepSpeed takes seconds a process."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec import json as encoder

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.inductor_settings import INDUCTOR
from distrain.trainer.launch.admission import check_start
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.prove.fork_client import COMMAND, ForkServer
from distrain.trainer.rundir.metric_rows import SAVE_KEY


@dataclass(frozen=True, kw_only=True)
class PoolJob:
    """A finished run on the pool: each rank's exit status, rank 0's lines for the user, and the problems that ranks reported."""

    folder: Path
    codes: tuple[int, ...]
    lines: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, of all attempts of the folder's run, without those of saves."""
        return [row for row in self.all_rows if SAVE_KEY not in row]

    @property
    def saves(self) -> list[dict[str, Any]]:
        """The rows of saves."""
        return [row for row in self.all_rows if SAVE_KEY in row]

    @property
    def all_rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl in their order."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def figures(self, key: str) -> list[float]:
        """One figure of every logged step; of a step that was run twice, the last value."""
        return list({row["step"]: row[key] for row in self.rows if key in row}.values())


PROGRAM = "distrain.tests.rank_programs.pool_ranks"  # a module whose `main` serves


def choose_program(folder: Path, name: str, *given: Any) -> None:
    """Have ranks of the pool do something else in a run whose folder is `folder` or lies in it: `name` is a key of pool_ranks.PROGRAMS."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program").write_text(json.dumps({"name": name, "given": given}))


class RankPool:
    """A fork server as that of `distrain prove`, of the module `program`; it runs one job at a time."""

    def __init__(self, log: Path, program: str = PROGRAM) -> None:
        self.server = ForkServer(log, environment={**os.environ, **INDUCTOR, "CUDA_VISIBLE_DEVICES": ""}, command=(*COMMAND, program))

    def fit(self, folder: Path, *words: str, signals: Sequence[tuple[int, int, int]] = ()) -> PoolJob:
        """Train conf=`words[0]` with the other words as `distrain fit` would, with `folder` as RUN_DIR; ranks may exit with any status.

        Devices are not checked unless a word says so. `signals` are (step, rank, signal): each rank sends itself its own at the beginning
        of that step. The test fails if the job passes its deadline.
        """
        given = words if any(word.startswith("launch.device_check=") for word in words) else (*words, "launch.device_check=0")
        run = load_recipe(given[0], [*given[1:], f"log.dir={folder.parent}", f"name={folder.name}"])
        plan = make_plan(run)
        assert not check_start(run, plan).problems
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_bytes(encoder.encode(run))
        if signals:
            (folder / "signals").write_text(json.dumps(signals))
        result = self.server.run_job(folder / "run.json", plan.world, seconds=DEADLINE)
        for file in folder.glob("signals*"):
            file.unlink()
        if result.timed_out:
            pytest.fail(f"{' '.join(words)} passed its {DEADLINE:.0f} s:\n{log_tails(folder)}")
        return PoolJob(folder=folder, codes=result.codes, lines=result.lines, problems=result.problems)

    def train(self, folder: Path, *words: str) -> PoolJob:
        """Train as `fit` does; the test fails unless every rank exits with 0."""
        job = self.fit(folder, *words)
        if set(job.codes) != {0}:
            pytest.fail(f"{' '.join(words)} ended with {job.codes}: {job.problems}\n{log_tails(folder)}")
        return job


def log_tails(folder: Path) -> str:
    """The last lines of each rank's log."""
    logs = sorted((folder / "ranks").glob("*.log"))
    return "\n".join(f"-- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:]) for log in logs)
