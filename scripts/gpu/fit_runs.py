"""Runs `distrain fit` as a user does, and reads what it leaves in its run folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

from ...trainer.rundir.read_files import read_mapping, read_rows
from ...trainer.system.child_process import module_arguments, start_child
from .check_context import CheckContext
from .finding import CheckBroken

RECIPE, ONE_DEVICE = "tiny_2x2x2", ("parallel.tp=1", "parallel.pp=1")  # of tiny models
FIT_WORDS = ("log.every=1", "log.sinks=[jsonl]", "train.evaluate.every=0", "checkpoint=never", "launch=local")
# Trainings side by side compile a few kernels each, and some compute on the CPU: without these every one starts a pool of processes and
# threads, one for each core, and waits for threads of its own that others keep from a core.
UNTIMED = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class FitRun:
    """A recipe with overrides, as the command line takes them, and its name in the folder of runs."""

    name: str
    recipe: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FinishedFit:
    """A finished training: the rows of metrics.jsonl, and what it counted and planned."""

    folder: Path
    rows: tuple[Mapping[str, Any], ...]
    plan: Mapping[str, Any]

    @property
    def losses(self) -> list[float]:
        """Loss by step, nan where it was not finite."""
        return [nan if row["loss"] is None else row["loss"] for row in self.rows]

    @property
    def step_seconds(self) -> float:
        """Median seconds of the steps after the first two, which compile and fill caches."""
        return float(median(row["seconds"] for row in self.rows[2:]))

    @property
    def step_tokens(self) -> float:
        """Tokens of a step."""
        return float(self.rows[-1]["tokens_per_second"] * self.rows[-1]["seconds"])

    @property
    def memory_peak(self) -> int:
        """Bytes of torch's allocator at most, after the first step."""
        return int(max(row["memory_peak"] for row in self.rows[1:]))


def fit_overrides(run: FitRun, context: CheckContext) -> tuple[str, ...]:
    """All overrides of a run, without where it is kept."""
    return (*context.words(), "parallel.dp=1", *FIT_WORDS, *run.words)


def fit(run: FitRun, context: CheckContext, variables: Mapping[str, str] | None = None) -> FinishedFit:
    """Train a run to its end, with further environment variables; raises CheckBroken with the last lines that `fit` printed."""
    with started_fit(run, context, variables) as process:
        said, _ = process.communicate()
    if process.returncode:
        tail = " | ".join(said.strip().splitlines()[-3:])
        raise CheckBroken(f"{run.name}: fit ended with {process.returncode}: {tail}")
    return read_trained(context.folder / run.name)


def fit_together(runs: Sequence[FitRun], context: CheckContext) -> dict[str, FinishedFit]:
    """Train runs, as many at a time as the machine can take; by name. Raises CheckBroken with why each of the others failed."""
    trained, failed = fit_each(runs, context)
    if failed:
        raise CheckBroken("; ".join(failed.values()))
    return trained


def fit_each(runs: Sequence[FitRun], context: CheckContext) -> tuple[dict[str, FinishedFit], dict[str, str]]:
    """As `fit_together`; return those that have trained, and why each of the others failed, by name."""

    def try_fit(run: FitRun) -> FinishedFit | str:
        try:
            return fit(run, context, UNTIMED)
        except CheckBroken as error:
            return str(error)

    with ThreadPoolExecutor(context.trainings_at_once) as pool:
        ended = dict(zip((run.name for run in runs), pool.map(try_fit, runs), strict=True))
    return {name: each for name, each in ended.items() if not isinstance(each, str)}, {
        name: each for name, each in ended.items() if isinstance(each, str)
    }


@contextmanager
def started_fit(run: FitRun, context: CheckContext, variables: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start `distrain fit` in a session of its own, with its output in a pipe; when the block ends it is killed with its ranks."""
    where = (f"log.dir={context.folder}", f"name={run.name}")
    arguments = module_arguments("distrain.__main__", "fit", f"conf={run.recipe}", *fit_overrides(run, context), *where)
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with start_child(arguments, {**os.environ, **(variables or {})}, **streams) as child:
        yield child


def read_trained(folder: Path) -> FinishedFit:
    """Read RUN_DIR; raises CheckBroken where it has fewer than three steps."""
    rows = tuple(row for row in read_rows(folder / "metrics.jsonl") if "seconds" in row and "loss" in row)
    plan = read_mapping(folder / "plan.json")
    if len(rows) < 3 or plan is None:
        raise CheckBroken(f"{folder.name} has logged {len(rows)} steps")
    return FinishedFit(folder=folder, rows=rows, plan=plan)
