"""Child processes of Python that end, with their own children, when the process that started them ends, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from . import parent_watch
from .stop_requests import collect_stop_requests

PATIENCE = 5.0  # seconds that an interrupted child has to clean up


def module_arguments(module: str, *arguments: str) -> list[str]:
    """Return Python's arguments that run the main() of a module with a parent-death watch: module_arguments("distrain.a.b", "x")."""
    return ["-m", "distrain.trainer.system.run_module", module, *arguments]


@contextmanager
def start_child(arguments: Sequence[str], environment: Mapping[str, str] = os.environ, **streams: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run `python ARGUMENTS` in a session of its own; when the block ends, kill it and its children.

    It ends with this process if it holds the parent-death watch (`module_arguments`). Raises OSError where it can't be started.
    """
    watched, held = os.pipe()
    try:
        with collect_stop_requests() as pending:  # an exception inside Popen would leave a child that never ends
            child = subprocess.Popen(
                [sys.executable, *arguments],
                env={**environment, "PYTHONSAFEPATH": "1", parent_watch.PARENT_WATCH_VARIABLE: str(watched)},
                pass_fds=(watched,),
                start_new_session=True,  # its parent-death watch kills its whole process group
                **streams,
            )
    except BaseException:
        os.close(held)
        raise
    finally:
        os.close(watched)
    try:
        for number, _ in pending:
            signal.raise_signal(number)
        yield child
    finally:
        os.close(held)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        end_child(child)


def interrupt_child(child: subprocess.Popen[Any]) -> None:
    """Send a child SIGINT, and kill it if it has not ended after PATIENCE or at a second Ctrl-C."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(PATIENCE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        child.kill()
        child.wait()


def end_child(child: subprocess.Popen[Any]) -> None:
    """Kill a child that may have ended already, wait for it, and close its pipes.

    Closing the stdin of a dead child flushes it and so raises BrokenPipeError, which is ignored: nothing reads it any more.
    """
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            with suppress(OSError, ValueError):
                pipe.close()
