"""Training a run from its folder: lock it, write its files, run its attempts, record the outcome."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from ..plan.plan_data import Plan
from ..rundir.absolute_paths import relative_folder
from ..rundir.files import read_launch_files, remove_outcome, restore_launch_files, run_folder, write_launch_files, write_outcome
from ..rundir.lock import RunFolderInUse, hold_run_folder
from ..rundir.run_summary import run_summary
from ..spec.run import Run
from ..system.stop_requests import collect_stop_requests
from .hosts.hostfile import Host
from .restart import run_attempts
from .supervisor.outcome import FAILED, TRAINED, Outcome

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The exit status of `fit`, why the run failed or stopped ("" where it trained), and the stop signals that arrived meanwhile.

    A run that was asked to stop may still have come to its end: then `status` is 0 and `stop_signals` is not empty.
    """

    status: int
    says: str = ""
    stop_signals: tuple[int, ...] = field(default=())


def train_run(run: Run, plan: Plan, hosts: Sequence[Host], show: Callable[[str], None], live: Callable[[str], None]) -> TrainingResult:
    """Write the run's folder, start its ranks, on `hosts` or on this machine, and wait for the last attempt to end."""
    folder = run_folder(run)
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            warning = stack.enter_context(hold_run_folder(folder))
            before = read_launch_files(folder)
            write_launch_files(run, plan, folder)
        except RunFolderInUse as error:
            return TrainingResult(status=FAILED, says=str(error))
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            mend = (
                "free some space, or set log.dir to another disk"
                if error.errno in DISK_FULL
                else "a file is where the run folder would be: set name or log.dir to another"
                if error.errno in (errno.EEXIST, errno.ENOTDIR)
                else "set log.dir to a folder that you can write"
            )
            return TrainingResult(status=FAILED, says=f"{folder} can't be written ({why}): {mend}")
        if warning:
            show(f"warning: {warning}")
        show(f"run folder {relative_folder(folder)}")
        remove_outcome(folder)
        with collect_stop_requests() as requests:
            outcome = run_attempts(run, plan, hosts, folder, show, live, stop_requests=requests)
        write_end(outcome, before, folder)
    return TrainingResult(status=outcome.status, says=outcome.says, stop_signals=tuple(number for number, _ in requests))


def write_end(outcome: Outcome, before: Mapping[str, bytes], folder: Path) -> None:
    """Write how a `fit` ended. One that was refused, or that trained or was stopped without a step, leaves the files as they were `before`:
    run.json is that of the run which trained, and so is how it ended, unless that run has no step left."""
    is_over = outcome.status != FAILED and "run.json" in before
    unchanged = not outcome.has_stepped and (outcome.is_refused or is_over)
    if unchanged:
        restore_launch_files(before, folder)
    if not unchanged or (outcome.status == TRAINED and _has_every_step(folder)):
        write_outcome(folder, outcome.status, outcome.says)


def _has_every_step(folder: Path) -> bool:
    """Return whether the steps that a run folder's own run.json asks for are done."""
    found = run_summary(folder)
    return found.of is None or found.steps >= found.of
