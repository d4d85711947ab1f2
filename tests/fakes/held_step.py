"""Holds the ranks of `distrain fit` at the beginning of a step, until a test lets them go on: what it does to the run comes in that step.

A run of a few small steps would have ended before a test on a busy machine has seen it at one.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from distrain.tests.fakes.processes import until

# These are files sitecustomize.py. json.dumps makes a rank's message that it begins the step.
SITE = """
import json, os, time
from pathlib import Path
folder, dumps = Path({folder!r}), json.dumps
def dumps_and_wait(value, *rest, **named):
    if value == {{"step": {step}}} and "RANK" in os.environ:
        mark = folder / f"new{{os.environ['RANK']}}"
        mark.write_text(str(os.getpid()))
        mark.rename(folder / f"rank{{os.environ['RANK']}}")
        while not (folder / "go").exists(): time.sleep(0.01)
    return dumps(value, *rest, **named)
json.dumps = dumps_and_wait
"""
FAILS = """
import json, os, signal, time
from pathlib import Path
folder, dumps = Path({folder!r}), json.dumps
def dumps_and_fail(value, *rest, **named):
    line = dumps(value, *rest, **named)
    how = {{"step": {hung}}}, {{"step": {killed}}}
    mark = folder / line.replace(" ", "")
    if value in how and os.environ.get("RANK") == "{rank}" and not mark.exists():
        mark.touch()
        os.write(int(os.environ["DISTRAIN_CONTROL_FD"]), line.encode() + b"\\n")
        if value == how[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
    return line
json.dumps = dumps_and_fail
"""


class HeldStep:
    """A step, counted from 0, in which ranks wait for a file in a folder that all hosts see."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(SITE.format(folder=str(folder), step=step))

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the ranks."""
        return {"PYTHONPATH": str(self.folder)}

    def wait_for(self, ranks: int, fit: subprocess.Popen[str]) -> list[int]:
        """Wait until so many ranks of `fit` are held; return their process ids, as their hosts number them."""
        marks = [self.folder / f"rank{rank}" for rank in range(ranks)]
        until(lambda: all(mark.exists() for mark in marks) or fit.poll() is not None)
        assert fit.poll() is None, fit.communicate()[0]
        return [int(mark.read_text()) for mark in marks]

    def release(self) -> None:
        """Let the ranks go on, and those of later attempts."""
        (self.folder / "go").touch()


class FailingSteps:
    """Two steps, counted from 0: one rank begins the first and does not go on with it, and is killed in the other, once each; folder as of
    HeldStep."""

    def __init__(self, folder: Path, rank: int, *, hung: int, killed: int) -> None:
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(FAILS.format(folder=str(folder), hung=hung, killed=killed, rank=rank))
        self.environment = {"PYTHONPATH": str(folder)}
