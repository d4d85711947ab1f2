"""A child process that answers in lines of JSON, and that ends when this process does, however that is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

from .child_process import start_child

PATIENCE = 5.0  # seconds that a child has to tidy up once it is told to stop
Hear = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How a child ended: its exit status (minus the signal that killed it) and the last line of its stderr."""

    status: int
    complaint: str


def ask(
    words: Sequence[str], document: object, hear: Hear, *, seconds: float | None = None, environment: Mapping[str, str] = os.environ
) -> Answer:
    """Run `python WORDS` with a document as JSON on its stdin, and hear each JSON object that it writes as a line of stdout.

    It is killed after so many seconds. At Ctrl-C it is told to stop, waited for, and KeyboardInterrupt goes on. Raises OSError where
    it can't be started.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as complaints:
        given.write(json.dumps(document).encode())
        given.seek(0)
        with start_child(words, environment, stdin=given, stdout=subprocess.PIPE, stderr=complaints) as child:
            timer = Timer(seconds, child.kill) if seconds is not None else None
            try:
                if timer:
                    timer.start()
                _listen(child, hear)
                child.wait()
            except BaseException:
                _stop(child)
                raise
            finally:
                if timer:
                    timer.cancel()
        return Answer(status=child.returncode, complaint=_last_line(complaints))


def _listen(child: subprocess.Popen[bytes], hear: Hear) -> None:
    """Hear every line that is a JSON object, to the end of the child's stdout; others are nobody's."""
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            with suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict):
                    hear(said)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Tell a child to stop, and kill it where it does not."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(PATIENCE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        child.kill()
        child.wait()


def _last_line(file: Any) -> str:
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - 4096))
    lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def module_words(module: str, *words: str | Path) -> list[str]:
    """Return the words that run a module of this package: module_words("trainer.machine.probe")."""
    return ["-m", f"distrain.{module}", *map(str, words)]
