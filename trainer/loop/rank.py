"""The process of one rank: python -m distrain.trainer.loop.rank RUN_DIR/run.json [FILE].

Where no `fit` starts it, the run is read from FILE, and rank 0 writes RUN_DIR/run.json once it holds the folder's lock.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from ..launch.rank.channel import STOPPED, Channel
from ..launch.rank.foreign_launcher import hold_folder, is_foreign, open_channel
from ..launch.rank.hang_answer import HangAnswer
from ..rundir.lock import RunFolderInUse
from ..system.garbage_collection import keep_imports
from ..system.parent_watch import watch_parent_from_environment
from ..system.stop_requests import StopFlag
from .failures.failure import report_failure
from .metrics.sink_thread import is_any_stuck


def main() -> int:
    """Train the run of the command line's file. Return the exit status."""
    path, *started = map(Path, sys.argv[1:])
    with contextlib.ExitStack() as held:
        try:
            warning = held.enter_context(hold_folder(path.parent))
        except RunFolderInUse as error:  # before anything is written there, such as this rank's log
            Channel.from_environment().report_problem(str(error), refused=True)
            return 1
        channel = open_channel(path.parent)
        if warning:
            channel.say(f"warning: {warning}")
        return run_rank(path, channel, held.close, *started)


def run_rank(path: Path, channel: Channel, release: Callable[[], None] = lambda: None, started: Path | None = None) -> int:
    """Train the run of RUN_DIR/run.json as the rank that the environment names. Return the exit status, but exit here after a failure, or
    where a log sink does not end, once `release` has released what the process holds.

    A normal exit waits for Python's threads, and one of them may wait for a disk or a device that does not answer.
    """
    stop = StopFlag(listens=not is_foreign())  # alone a rank has nothing to save before it has joined the others
    answer = HangAnswer(channel)
    watch_parent_from_environment()
    try:
        with keep_imports():
            from .failures.recorded_collectives import recorded_collectives
            from .train_rank import train_rank  # torch and DeepSpeed: seconds, in which a stop or a stack dump may be requested
        answer.read = recorded_collectives
        status = train_rank(path, channel, stop, started)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except Exception as error:
        report_failure(error, channel)
        status = 1
    if status not in (0, STOPPED) or is_any_stuck():
        with contextlib.suppress(OSError):
            release()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
