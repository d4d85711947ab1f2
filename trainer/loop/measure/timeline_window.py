"""The timeline of the steps log.timeline=[first, last]: every rank times its actions and writes RUN_DIR/timeline/RANK.json."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from ...engines.engine import Engine
from ...engines.span_recorder import SpanRecorder
from ...plan.timeline.timed_spans import TimedSpan, TimedStep
from ...rundir.timeline_files import VERSION, RankTimeline, layout_key, write_rank_timeline
from ...spec.run import Run
from ...system.cpu import cpu_count
from ..state.training_setup import TrainingSetup
from .common_clock import CommonClock, common_clock, machine_name

PLACES = 7  # decimals of a second that are kept


class TimelineWindow:
    """Records the steps of the window on this rank; all ranks call its methods together."""

    def __init__(self, run: Run, setup: TrainingSetup) -> None:
        self.run, self.engine, self.world, self.folder, self.host = run, setup.engine, setup.world, setup.folder, setup.host
        self.window = run.log.timeline
        self._recorder: SpanRecorder | None = None
        self._machine = ""

    def start_step(self, step: int) -> None:
        """Compare the ranks' clocks before the first step (from 1) of the window that this run does."""
        if self.window and self.window[0] <= step <= self.window[1] and self._recorder is None:
            self._machine = machine_name()
            self._clock = common_clock(self.host, self.world.rank, self._machine)
            self._recorder = SpanRecorder(self.world.device)

    @contextmanager
    def record(self, step: int) -> Iterator[None]:
        """Record the step (from 1) that the block runs, if it is in the window."""
        recorder = self._recorder
        if recorder is None:
            yield
            return
        recorder.begin_step()
        with _recording(self.engine, recorder):
            yield
        recorder.end_step(step)

    def end_step(self, step: int, *, last: bool) -> str:
        """After the last step of the window or the run, write this rank's file. Return why a rank could not, else ""."""
        if self._recorder is None or self.window is None or not (last or step >= self.window[1]):
            return ""
        timeline, self._recorder = self._timeline(self._recorder), None
        problems = [""] * self.world.size
        dist.all_gather_object(problems, write_timeline(self.folder, timeline), group=self.host)
        return next(filter(None, problems), "") if self.world.is_rank0 else ""

    def _timeline(self, recorder: SpanRecorder) -> RankTimeline:
        cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else tuple(range(cpu_count()))
        return RankTimeline(
            version=VERSION,
            attempt=self._clock.name,
            layout=layout_key(self.run),
            rank=self.world.rank,
            world=self.world.size,
            device=self.world.device.type,
            machine=self._machine,
            cores=cores,
            threads=torch.get_num_threads(),
            clock_error=self._clock.error,
            steps=tuple([_on_common_clock(step, self._clock) for step in recorder.read_steps()]),
        )


@contextmanager
def _recording(engine: Engine, recorder: SpanRecorder) -> Iterator[None]:
    engine.recorder = recorder
    try:
        yield
    finally:
        engine.recorder = None


def _on_common_clock(step: TimedStep, clock: CommonClock) -> TimedStep:
    def at(seconds: float) -> float:
        return round(clock.seconds(seconds), PLACES)

    spans = tuple([TimedSpan(kind, micro, part, at(start), at(end)) for kind, micro, part, start, end in step.spans])
    return TimedStep(step.step, at(step.start), at(step.end), round(step.cpu, PLACES), spans)


def write_timeline(folder: Path, timeline: RankTimeline) -> str:
    """Write a rank's file. Return why it could not be written, else ""."""
    try:
        write_rank_timeline(folder, timeline)
    except OSError as error:
        return f"the timeline of rank {timeline.rank} could not be written: {error.strerror or error}"
    return ""
