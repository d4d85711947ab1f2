"""A rank that torchrun or Slurm started: it dies with its launcher, has a log of its own, and on rank 0 locks the run folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import IO

from ...rundir.files import LAUNCH_FOLDER
from ...rundir.lock import LOCK_FILE, hold_run_folder
from ...system import parent_watch
from .channel import Channel
from .log import has_partial_line, open_rank_log

LAUNCHER_VARIABLES = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID")  # variables that torchrun and srun set


def is_foreign(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether no `fit` started this rank."""
    return not environment.get(parent_watch.PARENT_WATCH_VARIABLE)


def open_channel(folder: Path, environment: Mapping[str, str] = os.environ) -> Channel:
    """Return this rank's channel. If torchrun or Slurm started it, it dies with that launcher from now on, its output goes to a log, and
    its messages for the user stay on stdout.

    The log of rank 0, which holds the folder's lock, is RUN_DIR/ranks/0.log. Other ranks may belong to a start that their rank 0 refuses:
    until they have joined it (`keep_log`), their log is RUN_DIR/launch/RANK.log.
    """
    if not _has_log(environment):
        return Channel.from_environment(environment)
    parent_watch.die_with_parent(os.getppid())
    rank = _rank(environment)
    logs = folder / "ranks" if rank == 0 else folder / LAUNCH_FOLDER
    try:
        logs.mkdir(parents=True, exist_ok=True)
        if rank:
            (logs / f"{rank}.log").unlink(missing_ok=True)
        _, file = open_rank_log(logs, rank, int(environment.get("WORLD_SIZE", "1")))
        stdout = os.fdopen(os.dup(1), "w")
        with file:
            _redirect_output(file)
    except OSError as error:
        print(f"the output of rank {rank} goes to no log: {error}", file=sys.stderr)
        return Channel(None)
    return Channel(None, stdout)


def keep_log(folder: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Once a rank of `open_channel` has joined the others, move its log to RUN_DIR/ranks; nothing is moved where that can't be written, nor
    the log of another start, which has replaced this rank's."""
    rank = _rank(environment)
    if rank == 0 or not _has_log(environment):
        return
    early, path = folder / LAUNCH_FOLDER / f"{rank}.log", folder / "ranks" / f"{rank}.log"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file, _own_log(early) as written:
            file.write((b"\n" if has_partial_line(path) else b"") + written.read())
            _redirect_output(file)
            file.write(written.read())  # what came meanwhile


@contextmanager
def _own_log(early: Path) -> Iterator[IO[bytes]]:
    """Open this rank's early log, and remove it after the block; an empty file where it is another start's by now."""
    try:
        written: IO[bytes] = early.open("rb")
    except OSError:
        written = BytesIO()
    with written:
        is_own = not isinstance(written, BytesIO) and os.path.samestat(os.fstat(written.fileno()), os.fstat(1))
        yield written if is_own else BytesIO()
        if is_own:
            early.unlink(missing_ok=True)


@contextmanager
def hold_folder(folder: Path, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Hold RUN_DIR's lock while the block runs, on rank 0 of ranks that no `fit` started, which holds it for those that it starts. Yields
    why it can't be held, "" if it is. Raises RunFolderInUse."""
    with ExitStack() as stack:
        warning = ""
        if is_foreign(environment) and _rank(environment) == 0:
            try:
                warning = stack.enter_context(hold_run_folder(folder))
            except OSError as error:
                warning = (
                    f"{folder / LOCK_FILE} can't be written ({error.strerror or error}): nothing stops another run from training there"
                )
        yield warning


def _has_log(environment: Mapping[str, str]) -> bool:
    return is_foreign(environment) and any(environment.get(name) for name in LAUNCHER_VARIABLES)


def _rank(environment: Mapping[str, str]) -> int:
    return int(environment.get("RANK", "0"))


def _redirect_output(file: IO[bytes]) -> None:
    """Redirect stdout and stderr to a file."""
    for each in (1, 2):
        os.dup2(file.fileno(), each)
