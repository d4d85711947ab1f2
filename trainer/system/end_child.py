"""Child processes end: killed, waited for and closed, whatever closing their pipes raises."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from typing import Any


def end_child(child: subprocess.Popen[Any]) -> None:
    """Kill a child that may have ended already, wait for it, and close its pipes.

    Closing the stdin of a dead child writes what was not flushed and so raises BrokenPipeError; nothing reads it any more.
    """
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            with suppress(OSError, ValueError):
                pipe.close()
