"""Children that run a module's main() and end with this process: the heavy part of a verb, which imports torch."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from tempfile import TemporaryFile
from typing import Any

from .child_process import interrupt_child, module_arguments, start_child
from .stop_requests import StopSignal, raise_on_stop_signals


def run_child(module: str, arguments: Sequence[str], stdin_text: str = "") -> int:
    """Run the main() of a module with `stdin_text` on its stdin; return its exit status, or 128 and the signal that stopped this process
    or killed the child."""
    try:
        with raise_on_stop_signals(), TemporaryFile() as stdin:
            stdin.write(stdin_text.encode())
            stdin.seek(0)
            with start_child(module_arguments(module, *arguments), stdin=stdin) as child:
                try:
                    status = child.wait()
                except (KeyboardInterrupt, StopSignal):
                    interrupt_child(child)
                    raise
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except StopSignal as stop:
        return 128 + stop.number
    return status if status >= 0 else 128 - status


def capture_child(
    module: str, arguments: Sequence[str] = (), *, seconds: float, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run the main() of a module and return its output; raises OSError, and TimeoutExpired after `seconds`."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    with start_child(module_arguments(module, *arguments), environment, stdin=subprocess.DEVNULL, **pipes) as child:
        out, err = child.communicate(timeout=seconds)
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)
