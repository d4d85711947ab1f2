"""A Ctrl-C while a recipe is composed is a KeyboardInterrupt, wherever it meets Hydra and OmegaConf."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Self

import pytest

from distrain.cli.config.load import load_recipe
from distrain.cli.keys import config_files

# A Ctrl-C in what Python calls back while the command line is imported, where an exception is printed and forgotten.
LOST_INTERRUPT = """
import os, signal, sys
class Called:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        len("the signal has arrived")
class Finder:
    def find_spec(self, name, *_):
        if name == "distrain.cli.app":
            Called()
signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[1] == "ignored" else signal.default_int_handler)
sys.meta_path.insert(0, Finder())
from distrain.__main__ import main
sys.argv[1:] = ["--version"]
main()
"""
INTERRUPTED = 25  # points in the calls of one composition


class InterruptAtCall:
    """Raises KeyboardInterrupt at the call of that number into the two packages; without one, counts the calls."""

    def __init__(self, number: int | None = None) -> None:
        self.number, self.calls = number, 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and ("/omegaconf/" in frame.f_code.co_filename or "/hydra/" in frame.f_code.co_filename):
            self.calls += 1
            if self.calls == self.number:
                raise KeyboardInterrupt

    def __enter__(self) -> Self:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def test_a_composition_that_is_interrupted_anywhere_raises_nothing_else(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    shutil.copy(config_files.recipes(None)["quickstart"], recipe)
    arguments = (str(recipe), ["model=tiny", "train.seq=32"])
    load_recipe(*arguments)
    with InterruptAtCall() as counted:
        load_recipe(*arguments)
    assert counted.calls > 1000
    for number in range(1, counted.calls, counted.calls // INTERRUPTED):
        with pytest.raises(KeyboardInterrupt), InterruptAtCall(number):
            load_recipe(*arguments)
    load_recipe(*arguments)


@pytest.mark.parametrize("disposition", ["raised", "ignored"])
def test_a_ctrl_c_while_the_command_line_is_imported_ends_it_in_silence_unless_it_is_ignored(disposition: str) -> None:
    done = subprocess.run([sys.executable, "-c", LOST_INTERRUPT, disposition], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT if disposition == "raised" else 0, "")
    assert bool(done.stdout) == (disposition == "ignored")
