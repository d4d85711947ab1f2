"""A copy of the checkout in a temporary folder, in which errors are planted, and the warm process that tries them there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from ...trainer.system.child_process import end_child

Item = TypeVar("Item")

ROOT = Path(__file__).parents[2]
NOT_COPIED = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info")


class CopyGone(Exception):
    """The warm process of a copy ended without a reply; its log says why."""


class Copy:
    """A copy of the checkout as the package `distrain` in `folder`, and a process that has imported torch and DeepSpeed.

    It answers one request at a time, each in a forked process, of which nothing is left afterwards.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "distrain"
        shutil.copytree(ROOT, self.root, ignore=NOT_COPIED)
        with (folder / "warm.log").open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "distrain.scripts.mutations.warm_process"],
                cwd=folder,
                env=_environment(folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is for the parent, which ends it
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, action: str, *, seconds: float, **arguments: Any) -> dict[str, Any]:
        """Return what an action of actions.py answers, or {"ended": how} where it ended without an answer; raises CopyGone."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        request = {"action": action, "seconds": seconds, "arguments": arguments}
        try:
            self._child.stdin.write(f"{json.dumps(request)}\n")
            self._child.stdin.flush()
        except OSError:
            raise CopyGone(f"see {self.folder / 'warm.log'}") from None
        line = self._child.stdout.readline()
        if not line:
            raise CopyGone(f"see {self.folder / 'warm.log'}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def plant(self, path: str, source: str) -> None:
        """Replace a file of the copy, until `restore`."""
        (self.root / path).rename(self.folder / "unchanged")
        (self.root / path).write_text(source, encoding="utf-8")

    def restore(self, path: str) -> None:
        """Make a file of the copy as it was; it has its old time, so that its bytecode is used again."""
        with suppress(FileNotFoundError):  # restored already
            (self.folder / "unchanged").replace(self.root / path)

    def close(self) -> None:
        """End the process and all that it started, even in the middle of a request."""
        self._child.terminate()  # it kills what it started
        try:
            self._child.wait(20.0)
        finally:
            end_child(self._child)


def run_on_copies(copies: Sequence[Copy], items: Sequence[Item], act: Callable[[Copy, Item], None]) -> None:
    """Call `act` with each item and a copy that is free, as many at a time as there are copies.

    After an error or Ctrl-C the copies are closed, and no further item is begun.
    """
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def act_on_one(item: Item) -> None:
        copy = free.get()
        try:
            act(copy, item)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as threads:
        jobs = [threads.submit(act_on_one, each) for each in items]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            for job in jobs:
                job.cancel()
            for copy in copies:
                copy.close()
            raise


def _environment(folder: Path) -> Mapping[str, str]:
    """The environment of a copy's processes: `distrain` is the copy, and no bytecode outlives a planted error."""
    return {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONSAFEPATH": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    }
