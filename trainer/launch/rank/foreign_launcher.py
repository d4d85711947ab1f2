"""A rank that torchrun or Slurm started: it dies with its launcher, has a log of its own, and on rank 0 locks the run folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from ...rundir.lock import LOCK_FILE, hold_run_folder
from ...system import parent_watch
from .channel import Channel
from .log import open_rank_log

LAUNCHER_VARIABLES = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID")  # variables that torchrun and srun set


def open_channel(folder: Path, environment: Mapping[str, str] = os.environ) -> Channel:
    """Return this rank's channel. If another launcher started it, it dies with that launcher from now on, its output goes to
    RUN_DIR/ranks/RANK.log, and its messages for the user stay on stdout."""
    if environment.get(parent_watch.PARENT_WATCH_VARIABLE) or not any(environment.get(name) for name in LAUNCHER_VARIABLES):
        return Channel.from_environment(environment)
    parent_watch.die_with_parent(os.getppid())
    try:
        return Channel(None, _redirect_output(folder / "ranks", environment))
    except OSError as error:
        print(f"the output of rank {environment.get('RANK', '0')} goes to no log: {error}", file=sys.stderr)
        return Channel(None)


@contextmanager
def hold_folder(folder: Path, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Hold RUN_DIR's lock while the block runs, on rank 0 of ranks that no `fit` started, which holds it for those that it starts. Yields
    why it can't be held, "" if it is. Raises RunFolderInUse."""
    with ExitStack() as stack:
        warning = ""
        if not environment.get(parent_watch.PARENT_WATCH_VARIABLE) and environment.get("RANK", "0") == "0":
            try:
                warning = stack.enter_context(hold_run_folder(folder))
            except OSError as error:
                warning = (
                    f"{folder / LOCK_FILE} can't be written ({error.strerror or error}): nothing stops another run from training there"
                )
        yield warning


def _redirect_output(logs: Path, environment: Mapping[str, str]) -> TextIO:
    """Redirect stdout and stderr to this rank's log; return the previous stdout."""
    logs.mkdir(parents=True, exist_ok=True)
    _, file = open_rank_log(logs, int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1")))
    stdout = os.fdopen(os.dup(1), "w")
    with file:
        for each in (1, 2):
            os.dup2(file.fileno(), each)
    return stdout
