"""The children that do a verb's heavy part, which end with this process, and the folder of a run that verbs are given."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import Any

from ..spec.plain_file import expanded
from ..spec.problem import Problem, Unreadable
from .child_process import start_child

PATIENCE = 5.0  # seconds that a child has to tidy up after it was told to stop
RUNNER = "distrain.trainer.system.run_module"
STOPS = (signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """This process was told to stop, by the signal `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_child(module: str, words: Sequence[str], told: str = "") -> int:
    """Run the main() of distrain.trainer.loop.MODULE with WORDS, and `told` as its stdin; its exit status. However this process ends,
    so does the child."""
    try:
        with ExitStack() as stack:
            stack.enter_context(stops_raised())
            stdin = stack.enter_context(TemporaryFile())
            stdin.write(told.encode())
            stdin.seek(0)
            child = stack.enter_context(start_child(["-m", RUNNER, f"distrain.trainer.loop.offline.{module}", *words], stdin=stdin))
            try:
                status = child.wait()
            except (KeyboardInterrupt, Stopped):
                child.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(PATIENCE)
                raise
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Stopped as stop:
        return 128 + stop.number
    return status if status >= 0 else 128 - status


def ask_child(
    module: str, words: Sequence[str] = (), *, seconds: float, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run the main() of a module with its output caught; raises OSError, and TimeoutExpired after so many seconds."""
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    with start_child(["-m", RUNNER, module, *words], environment, stdin=subprocess.DEVNULL, **piped) as child:
        out, err = child.communicate(timeout=seconds)
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


@contextmanager
def stops_raised() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise `Stopped` here, unless they are ignored; in the main thread, which alone is told of signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    before = {number: signal.getsignal(number) for number in STOPS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_folder(folder: Path) -> Path:
    """RUN_DIR as a whole path; raises Unreadable where it is no run's folder."""
    path = expanded(folder).absolute()
    if os.path.isfile(path / "run.json") or any(name.startswith("step_") for name in _names(path / "checkpoints")):
        return path
    there = os.path.isdir(path)
    inside = [name for name in _names(path) if os.path.isfile(path / name / "run.json")] if there else []
    says = f"{folder} holds no run.json" if there else f"{folder} is no folder"
    if os.path.lexists(path / "run.json"):
        says = f"{folder / 'run.json'} is no plain file"
    mend = f"did you mean {folder / inside[-1]}?" if inside else "give the folder of a run, such as runs/quickstart"
    raise Unreadable([Problem(rule="folder", says=says, mend=mend)])


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
