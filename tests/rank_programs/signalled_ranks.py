"""Ranks that send themselves signals: RUN_DIR/signals holds [[step, rank, signal], ...], of which each rank takes its own at that step.

Another process would send them too late now and then: the rank steps on meanwhile, and on a busy machine it may train to its end.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from distrain.tests.fakes.deadline import wait_for
from distrain.trainer.launch.rank.channel import Channel
from distrain.trainer.loop.forkserver.server import RankProgram


class SignallingChannel(Channel):
    """The channel of a rank, which sends itself its signals of a step once it has reported that it begins it."""

    def read_signals(self, file: Path) -> None:
        """Read which rank gets which signal, and when."""
        self.file, self.rows, self.rank = file, json.loads(file.read_text()), int(os.environ["RANK"])

    def report_step(self, step: int) -> None:
        """Report the step. Where several ranks get a signal in it, all of them come that far first: the death of one fails another."""
        super().report_step(step)
        numbers = {rank: number for at, rank, number in self.rows if at == step}
        if self.rank in numbers:
            marks = {rank: self.file.with_name(f"{self.file.name}.{step}.{rank}") for rank in numbers}
            marks[self.rank].touch()
            wait_for(lambda: all(mark.exists() for mark in marks.values()))
            os.kill(os.getpid(), numbers[self.rank])


def with_signals(program: RankProgram) -> RankProgram:
    """Return what a rank does, with its signals if there are any."""

    def run(path: Path, channel: Channel) -> int:
        if (file := path.with_name("signals")).exists():
            channel = SignallingChannel.from_environment()
            channel.read_signals(file)
        return program(path, channel)

    return run
