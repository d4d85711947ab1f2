"""The check that a killed run resumes."""

from __future__ import annotations

import os
import signal
import time

from ...trainer.rundir.metric_rows import read_step_rows
from .check_context import CheckContext
from .finding import CheckBroken, Finding
from .fit_runs import ONE_DEVICE, RECIPE, UNTIMED, FinishedFit, FitRun, fit, started_fit

SAVED, STEPS_IN_ALL = 20, 60  # a checkpoint at every so many steps
WORDS = (
    *ONE_DEVICE, "model=tiny_llama", "data=synthetic", "train.seq=64", "train.batch=8", "train.microbatch=2", "train.precision=fp32",
    f"train.steps={STEPS_IN_ALL}", "optim.warmup=0", "train.deterministic=true",
)  # fmt: skip


def kill_and_resume(context: CheckContext) -> Finding:
    """Train a run to its end; train it again with saves in the background, kill it between two checkpoints, and resume: losses must be the
    same bits."""
    words = (*WORDS, "checkpoint=default", f"checkpoint.every={SAVED}")
    whole = fit(FitRun(name="whole", recipe=RECIPE, words=words), context, UNTIMED)
    killed = FitRun(name="killed", recipe=RECIPE, words=(*words, "checkpoint.background=true"))
    last = _train_until(killed, context, SAVED + SAVED // 2)
    resumed = fit(killed, context, UNTIMED)
    again = {row["step"]: row["loss"] for row in resumed.rows}
    differing = [row["step"] for row in whole.rows if again.get(row["step"]) != row["loss"]]
    departures = [f"losses differ from step {differing[0]} on"] if differing else []
    departures += [f"it was killed at step {last}, after it had ended"] if last >= STEPS_IN_ALL else []
    first = _resumed_at(resumed)
    departures += [] if 0 < first < STEPS_IN_ALL else [f"it went on at step {first}"]
    return Finding(figures={"killed after step": last, "went on at step": first, "steps": STEPS_IN_ALL}, departures=tuple(departures))


def _train_until(run: FitRun, context: CheckContext, step: int) -> int:
    """Start a run, kill it with its ranks once it has logged `step`; return the last step that it logged. Raises CheckBroken."""
    folder = context.folder / run.name
    with started_fit(run, context, UNTIMED) as child:
        while child.poll() is None and max((row["step"] for row in read_step_rows(folder)), default=0) < step:
            time.sleep(0.01)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    logged = [row["step"] for row in read_step_rows(folder)]
    if not logged or logged[-1] < step:
        raise CheckBroken(f"{run.name} ended before step {step}")
    return int(logged[-1])


def _resumed_at(trained: FinishedFit) -> int:
    """Return the first step of the last attempt."""
    steps = [int(row["step"]) for row in trained.rows]
    return next((two for one, two in zip(steps[-2::-1], steps[:0:-1], strict=True) if two <= one), steps[0])
