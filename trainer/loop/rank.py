"""What one rank of a run does: python -m distrain.trainer.loop.rank RUN_DIR/run.json."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from pathlib import Path

from ..launch.rank.channel import STOPPED, Talk
from ..launch.rank.foreign_launcher import talk_of
from ..system.parent_watch import hold_from_environment
from ..system.stop_requests import Stop
from .failure import told


def main() -> int:
    """Train the run that the command line names; the exit status of this rank."""
    path = Path(sys.argv[1])
    return run_rank(path, talk_of(path.parent))


def run_rank(path: Path, talk: Talk) -> int:
    """Train the run of RUN_DIR/run.json as the rank that the environment names; its exit status.

    One that fails ends here and now, once it has said why: at its exit Python waits for threads, and one of them may wait for a
    disk or a device that does not answer.
    """
    stop = Stop()
    faulthandler.register(signal.SIGUSR2)  # a run that hangs is asked where: all threads' stacks go to the log
    hold_from_environment()
    try:
        from .setup import trained  # torch and DeepSpeed: seconds, in which this process is asked to stop, or where it is

        status = trained(path, talk, stop)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except Exception as error:
        told(error, talk)
        status = 1
    if status not in (0, STOPPED):
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
