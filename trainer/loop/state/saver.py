"""Saves the checkpoints of a run on each rank: before training goes on, or while it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from ...parallel.world import new_host_group
from ...rundir.checkpoints import checkpoints_folder
from ...rundir.run_in_manifest import run_record
from ...spec.derived.batch_levels import run_steps
from ...spec.run import Run
from ..checkpoint import BackgroundWriter, SaveFailed, SaveResult, collect_over, gather_over, save_shards
from ..failures.failure import AllRanksFailed
from ..step.train_progress import TrainProgress
from .engine_state import owned_shards
from .resume_loss_check import resume_check_record
from .save_pauses import SavePauses
from .training_setup import TrainingSetup

WORTH_TELLING = 0.05  # seconds
LACKS_VALIDATION_KEY = "lacks_validation"  # of what a checkpoint records: a stop request left out the validation of its step


class Saver:
    """A rank's saves. Without checkpoint.background a save is complete when `save` returns. With it, the host then has a copy of what the
    rank saves, and a thread writes that, one checkpoint at a time.

    As a context it ends with the save under way, unless this rank alone has failed: the others may not answer then. All ranks make it,
    and call `save` and `finish`, together.
    """

    def __init__(self, run: Run, setup: TrainingSetup) -> None:
        self.newest = setup.start.step  # the step of the newest checkpoint that is complete, or that this run began at
        self._run, self._setup = run, setup
        self._writer = BackgroundWriter() if run.checkpoint.in_background else None
        host = new_host_group() if self._writer else setup.host
        self._reach = {"gather": gather_over(host), "collect": collect_over(host)}  # the other ranks
        self._step = self.newest  # of the last save that was begun
        self._pause = ""  # what the user is told of how long training waited for it
        self._pauses = SavePauses(perf_counter())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None or isinstance(error, AllRanksFailed):
            self.finish(at_end=True)

    def save(
        self, progress: TrainProgress, recent: Mapping[str, Sequence[float]], checked: int | None = None, *, lacks_validation: bool = False
    ) -> None:
        """Save the engine's state and the run's progress, with `recent` figures of its steps, and whether it lacks its validation, once the
        save under way has ended. One that fails is a warning. The newest checkpoint up to step `checked` stays.

        The checkpoint records the loss of the samples that come next (resume_loss_check.py), at the cost of one forward of a micro-batch.
        """
        run, setup, began = self._run, self._setup, perf_counter()
        before = self._step if self.finish() else None
        waited = (since := perf_counter()) - began
        setup.channel.report_phase("save")
        setup.engine.prepare_save()
        extra = {"name": run.name, **progress.extra(), "engine": setup.engine.counters(), **run_record(run)}
        extra |= {"recent": recent} if recent else {}
        extra |= {LACKS_VALIDATION_KEY: True} if lacks_validation else {}
        extra |= resume_check_record(run, setup.engine, setup.grid, setup.batches, progress.sample)
        ranks: dict[str, Any] = {"rank": setup.world.rank, "world": setup.world.size, **self._reach}
        what: dict[str, Any] = {"shards": owned_shards(run, setup.engine, setup.grid), "extra": extra, "keep": run.checkpoint.keep}
        what["checked"] = checked
        folder, self._step = checkpoints_folder(setup.folder), progress.step
        if self._writer is None:
            self._end(lambda: save_shards(folder, progress.step, **what, **ranks, on_progress=setup.channel.report_progress), since)
            return
        self._writer.start(folder, progress.step, **what, **ranks)
        ended = perf_counter()
        self._pause = _pause_text(ended - began, waited, before)
        self._pauses.add(ended - since)

    def report(self) -> None:
        """Report the save under way once it has ended."""
        if self._writer and self._writer.is_done:
            self.finish()

    def finish(self, *, at_end: bool = False) -> bool:
        """Wait for the save under way, `at_end` with nothing left to train; tell the user how it ended. Return whether there was one."""
        writer, channel = self._writer, self._setup.channel
        if writer is None or not writer.is_busy:
            return False
        since = perf_counter()
        if not writer.is_done:
            channel.report_phase("save")
        self._end(lambda: writer.result(channel.report_progress), since, at_end=at_end)
        return True

    def _end(self, result: Callable[[], SaveResult], since: float, *, at_end: bool = False) -> None:
        """Wait for a save's result, as training does from the time `since` on; note it and tell the user of it."""
        setup = self._setup
        try:
            saved = result()
        except SaveFailed as error:
            self._write_row(since, {"save_failed": 1}, at_end=at_end)
            if setup.world.is_rank0 and self._step < run_steps(self._run.train):
                setup.warn(str(error))
            elif setup.world.is_rank0:
                setup.channel.say(f"warning: {error}")  # nothing is left to train
            return
        self.newest = saved.step
        self._write_row(since, {"save_seconds": saved.seconds["total"], "save_bytes": saved.bytes}, at_end=at_end)
        if setup.world.is_rank0:
            size = f"{saved.bytes / 2**20:,.1f} MiB"
            setup.channel.say(f"saved step {saved.step} in {saved.seconds['total']:.1f} s ({size}){self._pause}")
            for note in saved.notes:
                setup.channel.say(f"warning: {note}")

    def _write_row(self, since: float, figures: Mapping[str, float], *, at_end: bool) -> None:
        """Write the row of the save that has ended to the sinks of rank 0, in seconds and bytes: its figures, how long training waited for
        it, and the time since the last save ended."""
        now = perf_counter()
        self._pauses.add(now - since)
        row = {"step": self._step, **figures, **self._pauses.end(now, now - since if at_end else 0.0)}
        if self._setup.sinks:
            self._setup.sinks.write(row)


def _pause_text(pause: float, waited: float, before: int | None) -> str:
    """Return how many seconds training waited for a save, `waited` of them for the save of step `before`, which was still under way."""
    why = f", {waited:.1f} s of it for the save of step {before}" if before is not None and waited >= WORTH_TELLING else ""
    return f"; training waited {pause:.2f} s{why}"
