"""The child that does the torch half of a verb, and the folder of a run that verbs are given."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..trainer.launch import lifeline
from ..trainer.spec.plain_file import expanded
from ..trainer.spec.problem import Problem, Unreadable

PATIENCE = 5.0  # seconds that a child has to tidy up after Ctrl-C


def run_child(module: str, words: Sequence[str]) -> int:
    """Run `python -m distrain.trainer.loop.MODULE WORDS`; its exit status. However this process ends, so does the child."""
    held, cut = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-m", f"distrain.trainer.loop.{module}", *words],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONSAFEPATH": "1", lifeline.VARIABLE: str(held)},
        pass_fds=(held,),
        start_new_session=True,  # its lifeline ends all of its process group
    )
    os.close(held)
    try:
        status = child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            child.kill()
        return 128 + signal.SIGINT
    finally:
        os.close(cut)
        child.wait()
    return status if status >= 0 else 128 - status


def run_folder(folder: Path) -> Path:
    """RUN_DIR as a whole path; raises Unreadable where it is no run's folder."""
    path = expanded(folder).absolute()
    if (path / "run.json").is_file():
        return path
    inside = sorted(each.parent for each in path.glob("*/run.json")) if path.is_dir() else []
    says = f"{folder} holds no run.json" if path.is_dir() else f"{folder} is no folder"
    mend = f"did you mean {folder / inside[-1].name}?" if inside else "give the folder of a run, such as runs/quickstart"
    raise Unreadable([Problem(rule="folder", says=says, mend=mend)])
