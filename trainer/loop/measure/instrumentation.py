"""Measurements around steps: bytes held, messages, traces, profiler, timeline, throughput, progress line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ...engines.held_bytes import ByteCounter
from ...parallel.ledger import Ledger
from ...parallel.world import World
from ...plan.layout.schedule_of_run import delay_of
from ...spec.run import Run
from ...system.atomic_file import write_atomically
from ...system.core_wait import seconds_without_core
from ..data.samples.sample_log import SampleLog
from ..metrics.throughput import ThroughputMeter
from ..state.training_setup import TrainingSetup
from ..step.step_results import FinishedStep
from ..step.train_progress import TrainProgress
from ..trace.tensor_recorder import requested_trace
from .expert_rank_load import expert_rank_loads
from .timeline_window import TimelineWindow

TIMED_STEPS = 20  # of a pipeline without a flush whose actions are timed
ORDERED_RANKS = 64  # most ranks of a run whose messages are written in order: there are thousands a rank
SEARCHED_STEPS = 100  # of which one is looked for that follows no evaluation
LINE_INTERVAL = 0.2  # seconds between two progress lines


class Instruments:
    """All measurements around steps `first` <= step < `last`, and their files."""

    def __init__(self, run: Run, setup: TrainingSetup, first: int, last: int) -> None:
        self.setup, self.last = setup, last
        self.run = run
        self.meter = ThroughputMeter(run, setup.plan, setup.world)
        self.profiler = ProfilerWindow(run, setup.world, setup.folder)
        self.timeline = TimelineWindow(run, setup)
        self.progress = ProgressLine(run, setup.start, last)
        self.trace = requested_trace(run, setup.engine, setup.grid, setup.folder)
        # Bytes are counted in the step after the first that updates weights, by then all tensors that stay are allocated.
        self._counted_steps = {first + 1 + run.parallel.staleness}
        # While the batch grows, pipelines hold less: they are counted again in the first step of the whole batch.
        self._counted_steps.add(max(*self._counted_steps, setup.start.whole_batch_step(run)))
        recorded, together = recorded_step(run, first, last), run.parallel.sync.every
        self._recorded_step, self._together = recorded if run.log.ledger else None, together
        # Steps that flush are timed one by one; others go on from step to step, so that several are timed, without the ledger's cost.
        timed = range(min(recorded + 1, last - 1), last)[:TIMED_STEPS] if delay_of(run.parallel) else [recorded]
        self._timed_steps = timed if run.log.ledger else []
        self._actions: list[dict[str, Any]] = []
        self._count: ByteCounter | None = None
        self._first = first
        each = setup.grid.size("dp") * run.train.microbatch
        logged = SampleLog(setup.batches, lambda step: setup.start.batch(run, first + step) // each)
        self.samples = logged if run.log.ledger else None

    @contextmanager
    def measure(self, step: int) -> Iterator[ByteCounter | None]:
        """Measure step `step` (from 0) while the block runs it. Yield the byte counter that the engine fills, in a step that is counted."""
        self._count = ByteCounter() if step in self._counted_steps else None
        self.profiler.start_step(step + 1)
        self.timeline.start_step(step + 1)
        ledger = Ledger(self.setup.grid) if step == self._recorded_step else None
        start = perf_counter()
        waited = seconds_without_core()
        times = self.setup.engine.time_actions(self._actions) if step in self._timed_steps else nullcontext()
        traced = self.trace.trace_step(step) if self.trace else nullcontext()
        with ledger or nullcontext(), times, traced, self.timeline.record(step + 1):
            yield self._count
        waited_now, seconds = seconds_without_core(), perf_counter() - start
        waits = {"without_core": waited_now - waited} if waited is not None and waited_now is not None else {}
        self.meter.add_step(seconds, {**self.setup.engine.clock, **waits}, self.setup.start.batch(self.run, step))
        if ledger:
            self.setup.warn(write_ledger(ledger, self.setup, self._first, step + 1, averages=(step + 1) % self._together == 0))
        if self._timed_steps and step == self._timed_steps[-1]:
            self.setup.warn(write_actions(self._actions, self.setup, step + 1))

    def ends_run(self, step: int) -> bool:
        """Return whether `distrain prove` wants no step after this one."""
        return self.trace is not None and step == self.trace.last

    def report(self, done: int, newest: FinishedStep | None) -> None:
        """Write what was measured in step `done` (from 1), and show the progress line with the loss of the newest step that has a result;
        None: there is none yet."""
        if self._count is not None:
            batch = self.setup.start.batch(self.run, done - 1) if self.run.train.rampup.batches else None
            loads = expert_rank_loads(self.run, self.setup, newest.result if newest and newest.done == done else None)
            self.setup.warn(write_measured(self._count, self.setup, done, batch, loads))
        if self.samples and done == self.last:
            self.setup.warn(write_samples(self.samples, self.setup, self._first))
        self.setup.warn(self.timeline.end_step(done, last=done == self.last))
        if message := self.profiler.end_step(done, last=done == self.last):
            self.setup.channel.say(message)
        if line := self.progress.line(done, newest.result.loss if newest else None):
            self.setup.channel.report_status(line)


def recorded_step(run: Run, first: int, last: int) -> int:
    """Return the step, from 0, whose messages are recorded, of those that this attempt trains: `first` <= step < `last`.

    It is the third, or the first that compresses gradients or uses a late sum: in the first two, engines send some of their set-up. Where
    workers step alone, it is the first then that they end together. A step right after an evaluation or a save, which evaluates too, is
    passed over where another one comes: at ZeRO 3 DeepSpeed gathers weights once more there.
    """
    together, third = run.parallel.sync.every, max(first + 2, run.parallel.compress.start, first + run.parallel.staleness)
    recorded = third + (-(third + 1) % together)
    each = [every for every in (run.train.evaluate.every, run.checkpoint.every) if every > 0]
    candidates = range(recorded, min(last, recorded + together * SEARCHED_STEPS), together)
    plain = (step for step in candidates if all(step % every for every in each))
    return next(plain, recorded if recorded < last else min(third, last - 1))


def write_measured(
    count: ByteCounter, setup: TrainingSetup, done: int, batch: int | None = None, expert_ranks: dict[str, Any] | None = None
) -> str:
    """Write RUN_DIR/measured.json: "step", "unigram_entropy" of the training text (nats a token; null of preferences), "memory": bytes by
    kind on the rank that holds most of that kind, "ranks": [bytes by kind], of a run that ramps its batch up "batch": sequences of that
    step, and where ranks share out experts "expert_ranks" (expert_rank_load.py). Return why it could not be written, else "".
    """
    ranks = _gather(setup, count.bytes)
    most = {kind: max(each[kind] for each in ranks) for kind in ranks[0]}
    if not setup.world.is_rank0:
        return ""
    corpus = setup.batches.corpus
    facts = {
        "step": done,
        "unigram_entropy": None if corpus.has_pairs else corpus.entropy,  # rank 0 has read the text for it; others would have to
        **({"batch": batch} if batch is not None else {}),
        **({"expert_ranks": expert_ranks} if expert_ranks else {}),
    }
    return _write(setup, "measured.json", {**facts, "memory": most, "ranks": ranks})


def write_ledger(ledger: Ledger, setup: TrainingSetup, first: int, done: int, *, averages: bool) -> str:
    """Write RUN_DIR/ledger.json: "step", "first" (the steps before this start), "averages" (whether workers, if there are several, averaged
    their weights in it), "ranks": [messages of that step by axis, verb and payload, with their number]; and, of few ranks,
    RUN_DIR/message_order.json: "ranks": [collectives of that step in order: ranks of the group, its name, verb, bytes].

    Return why one could not be written, else "".
    """
    rows = _gather(setup, [asdict(row) for row in ledger.rows])
    problem = _write(setup, "ledger.json", {"step": done, "first": first, "averages": averages, "ranks": rows})
    if setup.world.size > ORDERED_RANKS:
        return problem
    orders: list[Any] | None = [None] * setup.world.size if setup.world.is_rank0 else None
    torch.distributed.gather_object(ledger.collectives, orders, group=setup.host)
    return problem or _write(setup, "message_order.json", {"ranks": orders}, indent=None)


def write_actions(actions: list[dict[str, Any]], setup: TrainingSetup, done: int) -> str:
    """Write RUN_DIR/actions.json: "step", "ranks": [actions of that step: kind, micro, part, and start, end and cpu in seconds].

    Of a pipeline without a flush, "step" is the last of up to TIMED_STEPS, and U an update of the weights after a micro-batch. Engines
    without actions write none. Return why it could not be written, else "".
    """
    ranks = _gather(setup, actions)
    return _write(setup, "actions.json", {"step": done, "ranks": ranks}, indent=None) if any(ranks) else ""


def write_samples(log: SampleLog, setup: TrainingSetup, first: int) -> str:
    """Write RUN_DIR/samples.json: "first" (the first step, from 0), "windows" (of each source, in an epoch), "ranks": [steps: [samples:
    number, source, window, CRC-32]]. Return why it could not be written, else "".
    """
    facts = {"first": first, "windows": list(setup.batches.windows)}
    return _write(setup, "samples.json", {**facts, "ranks": _gather(setup, log.steps)}, indent=None)


def _gather(setup: TrainingSetup, value: Any) -> list[Any]:
    """Return every rank's value."""
    values: list[Any] = [None] * setup.world.size
    torch.distributed.all_gather_object(values, value, group=setup.host)
    return values


def _write(setup: TrainingSetup, name: str, content: dict[str, Any], indent: int | None = 1) -> str:
    """On rank 0, write a file of RUN_DIR whole or not at all. Return why that failed, else ""."""
    file = setup.folder / name
    try:
        if setup.world.is_rank0:
            write_atomically(file, f"{json.dumps(content, indent=indent)}\n".encode())
    except OSError as error:
        return f"{file} could not be written: {error.strerror or error}"
    return ""


class ProfilerWindow:
    """torch's profiler over the steps log.profile=[first, last], on rank 0: RUN_DIR/trace/steps_F_L.json, for Perfetto."""

    def __init__(self, run: Run, world: World, folder: Path) -> None:
        self.window = run.log.profile if world.is_rank0 else None
        self.folder = folder / "trace"
        self._open: torch.profiler.profile | None = None

    def start_step(self, step: int) -> None:
        """Start the profiler if step `step` (from 1), which is about to begin, is in the window."""
        if self.window and self.window[0] <= step <= self.window[1] and self._open is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._first = step
            self._open = torch.profiler.profile(activities=activities)
            self._open.start()

    def end_step(self, step: int, *, last: bool) -> str:
        """After the last step of the window or the run, write the trace. Return a line that says where, or why not; else ""."""
        if self._open is None or self.window is None or not (last or step >= self.window[1]):
            return ""
        profiler, self._open = self._open, None
        profiler.stop()
        file = self.folder / f"steps_{self._first}_{step}.json"
        try:
            self.folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            return f"warning: the profiler's trace could not be written: {error}"
        if not file.is_file():  # on a full disk torch leaves a temporary file and logs an error
            file.with_name(f"{file.name}.tmp").unlink(missing_ok=True)
            return f"warning: the profiler's trace could not be written: {file}"
        return f"profiler trace, for ui.perfetto.dev: {file}"


class ProgressLine:
    """The progress line: steps done, tokens/s, time left."""

    def __init__(self, run: Run, start: TrainProgress, last: int) -> None:
        self.run, self.start, self.last = run, start, last
        self.tokens = start.after(run, max(last, start.step)).tokens - start.tokens  # of all steps
        self._began = self._shown = perf_counter()

    def line(self, done: int, loss: float | None) -> str | None:
        """Return the line after `done` steps, or None until LINE_INTERVAL has passed."""
        now = perf_counter()
        if now - self._shown < LINE_INTERVAL:
            return None
        self._shown = now
        trained = self.start.after(self.run, done).tokens - self.start.tokens
        seconds = (now - self._began) / trained  # a token
        left = round(seconds * (self.tokens - trained))
        clock = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}" if left >= 3600 else f"{left // 60}:{left % 60:02}"
        words = [f"step {done}/{self.last}", *([] if loss is None else [f"loss {loss:.4f}"])]
        return "  ".join([*words, f"{1 / seconds:,.0f} tokens/s", f"{clock} left"])
