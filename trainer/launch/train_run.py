"""Training a run from its folder: lock it, write its files, run its attempts, record the outcome."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from ..plan.plan_data import Plan
from ..rundir.absolute_paths import relative_folder
from ..rundir.checkpoints import checkpoints_folder, newest_saved
from ..rundir.files import read_launch_files, remove_outcome, restore_launch_files, run_folder, write_launch_files, write_outcome
from ..rundir.lock import RunFolderInUse, hold_run_folder
from ..rundir.run_summary import run_summary
from ..spec.run import Run
from ..system.stop_requests import collect_stop_requests
from .hosts.hostfile import Host
from .restart import run_attempts
from .supervisor.outcome import FAILED

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
    checkpoints = checkpoints_folder(folder)
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            warning = stack.enter_context(hold_run_folder(folder))
            before, (saved, _) = read_launch_files(folder), newest_saved(checkpoints)
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
        # If no step was left to train, run.json should stay that of the run which trained, and so should how it ended, where it
        # has steps left. The ranks of the last of several attempts know only their own steps, so the checkpoint is compared too.
        untrained = outcome.status == 0 and all(rank.step is None for rank in outcome.ranks) and newest_saved(checkpoints)[0] == saved
        unchanged = outcome.is_refused or (untrained and "run.json" in before)
        if unchanged:
            restore_launch_files(before, folder)
        if not unchanged or (untrained and _has_every_step(folder)):
            write_outcome(folder, outcome.status, outcome.says)
    return TrainingResult(status=outcome.status, says=outcome.says, stop_signals=tuple(number for number, _ in requests))


def _has_every_step(folder: Path) -> bool:
    """Return whether the steps that a run folder's own run.json asks for are done."""
    found = run_summary(folder)
    return found.of is None or found.steps >= found.of
