"""A child process that is given a JSON document on stdin and answers in lines of JSON on stdout."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Timer
from typing import Any

from .child_process import interrupt_child, module_arguments, start_child

OnMessage = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class ChildAnswer:
    """How a child ended: its exit status (minus the signal that killed it) and the last line of its stderr."""

    status: int
    complaint: str


def ask_json_child(
    module: str,
    document: object,
    on_message: OnMessage,
    *,
    seconds: float | None = None,
    environment: Mapping[str, str] = os.environ,
) -> ChildAnswer:
    """Run the main() of a module with a document as JSON on its stdin; call `on_message` with each JSON object on its stdout.

    The child is killed after `seconds`. At Ctrl-C it is interrupted and waited for, and KeyboardInterrupt is raised again. Raises
    OSError where it can't be started.
    """
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
        stdin.write(json.dumps(document).encode())
        stdin.seek(0)
        with start_child(module_arguments(module), environment, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr) as child:
            timer = Timer(seconds, child.kill) if seconds is not None else None
            try:
                if timer:
                    timer.start()
                _read_messages(child, on_message)
                child.wait()
            except BaseException:
                interrupt_child(child)
                raise
            finally:
                if timer:
                    timer.cancel()
        return ChildAnswer(status=child.returncode, complaint=_last_line(stderr))


def _read_messages(child: subprocess.Popen[bytes], on_message: OnMessage) -> None:
    """Read the child's stdout to its end; lines that are no JSON objects are ignored."""
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            with suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    on_message(message)


def _last_line(file: Any) -> str:
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - 4096))
    lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
