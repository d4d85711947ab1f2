"""The training loop."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote
from typing import Any

from ..engines.engine import StepResult
from ..engines.held_bytes import ByteCounter
from ..launch.rank.channel import STOPPED_UNSAVED
from ..parallel.world import StopVote, any_rank
from ..rundir.metric_rows import AVERAGED, VALIDATION, key_of_set
from ..spec.derived.batch_levels import samples_before
from ..spec.run import Run
from ..spec.sections.lr_schedule import learning_rate
from ..system.stop_requests import StopFlag
from .data.samples.batches import Batch, microbatch_samples, prefetch
from .devices.device_checks import DeviceChecks
from .failures.anomalies import Anomalies
from .failures.failure import AllRanksFailed
from .measure.instrumentation import Instruments
from .metrics.step_row import finite_or_none, preference_row, step_row
from .metrics.throughput import ThroughputMeter
from .state.saver import Saver
from .state.training_setup import TrainingSetup
from .step.evaluate import evaluate
from .step.model_inputs import count_labels, model_inputs
from .step.step_results import FinishedStep, StepResults


class LastStepNotSaved(AllRanksFailed):
    """The run has reached its last step, and its checkpoint could not be saved."""


def train(run: Run, setup: TrainingSetup, stop: StopFlag) -> bool:
    """Train to the last step, or to the last one that a trace needs, and return True. Return False after a stop request: once a checkpoint
    is saved, or before the first step of a run that resumed.

    Raises TooManySkippedSteps, DeviceFault or LastStepNotSaved on all ranks, and SystemExit if the checkpoint of a stop request can't be
    saved.
    """
    first, last = setup.start.step, setup.start.last_step(run)
    if first >= last:
        setup.channel.say(no_steps_message(run, first, last))
    elif first > 0 and any_rank(stop.requested, setup.world.device):
        return False  # stopped before its first step: the checkpoint that it resumed from is still the newest
    micro_batches = read_micro_batches(run, setup, first, last)
    instruments, anomalies = Instruments(run, setup, first, last), Anomalies(run, setup.start, setup.recent)
    if instruments.samples:
        micro_batches = instruments.samples.record(micro_batches)
    results = StepResults()
    devices = DeviceChecks(run, setup)
    if first < last:
        devices.check_start(first)
    stop_vote = StopVote(setup.world.device, late=setup.engine.late_steps > 0)
    with Saver(run, setup) as saver:
        for step in range(first, last):
            setup.channel.report_step(step)
            lr = learning_rate(run.optim, step, last)
            results.begin(step + 1, lr)
            setup.engine.limits = anomalies.limits()
            with instruments.measure(step) as byte_counter:
                result = train_step(run, setup, micro_batches, step, lr, byte_counter)
                if is_due(run.parallel.sync.every, step + 1):
                    setup.engine.step_together()
            if instruments.ends_run(step):
                return True

            done = step + 1
            is_last = done == last
            stopping = stop_vote.vote(requested=stop.requested)
            evaluates = bool(setup.validations) and not stopping and (is_last or is_due(run.train.evaluate.every, done))
            saves = stopping or is_save_due(run, done, last)
            finished = results.finish([result, *(setup.engine.flush() if evaluates or saves or is_last else ())])
            instruments.report(done, finished[-1].result.loss if finished else None)
            saver.report()

            for each in finished:
                logs = each.done == last or stopping or is_due(run.log.every, each.done)
                log_step(run, setup, each, anomalies, instruments.meter, logs=logs, evaluates=evaluates and each.done == done)
                anomalies.raise_if_too_many(each.result, each.done)

            if evaluates and not is_last:  # a stop request that came meanwhile needs no other step
                stopping = stop_vote.vote_now(requested=stop.requested)
                saves = saves or stopping
            if devices.is_due(done):
                saver.finish()  # a check that finds a fault names the checkpoints since the one before
                devices.check(done)
            if saves:
                saver.save(setup.start.after(run, done), anomalies.recent_figures(), devices.checked)
                if saver.newest == done and not (stopping or is_last):
                    stopping = stop_vote.vote_now(requested=stop.requested)
            if stopping and not is_last:
                saver.finish(at_end=True)
                if saver.newest < done:
                    raise SystemExit(STOPPED_UNSAVED)
                return False
            if stopping and setup.validations:
                saver.finish(at_end=True)
                if setup.world.is_rank0 and saver.newest == last:
                    command = f"distrain evaluate {quote(str(setup.folder))}"
                    setup.channel.say(f"stopped in its last step: `{command}` computes the validation that was left out")
    setup.channel.report_phase("end")
    if saver.newest < last and is_save_due(run, last, last):
        raise LastStepNotSaved(unsaved_message(saver.newest, last))
    return True


def read_micro_batches(run: Run, setup: TrainingSetup, first: int, last: int) -> Iterator[Batch]:
    """Yield this rank's micro-batches of steps `first` <= step < `last`; the next is read while one is used.

    Workers that step alone take equal pieces of a global batch, one after another; the replicas of a worker share out its piece.
    """
    grid, microbatch, workers = setup.grid, run.train.microbatch, setup.grid.size("workers")
    replicas, worker = grid.size("dp") // workers, grid.coordinate("workers")  # replicas of a worker
    rank = grid.coordinate("dp") % replicas

    def samples() -> Iterator[range]:
        for step in range(first, last):
            share = setup.start.batch(run, step) // workers
            begin = setup.start.after(run, step).sample + worker * share
            for micro in range(share // (replicas * microbatch)):
                yield microbatch_samples(begin, micro=micro, dp_rank=rank, dp=replicas, microbatch=microbatch, batch=share)

    return prefetch(setup.batches, samples(), setup.world.device)


def train_step(
    run: Run, setup: TrainingSetup, micro_batches: Iterator[Batch], step: int, lr: float, byte_counter: ByteCounter | None
) -> StepResult | None:
    """Run forward and backward on this rank's micro-batches of a step, then the optimizer; all ranks call this together. Return its result,
    or that of an earlier step where the engine gives them late."""
    batch = setup.start.batch(run, step)
    setup.engine.set_batch(batch)
    label_count = batch * run.train.seq
    if setup.batches.corpus.ignores_labels:  # read the whole step to know how many labels count
        batches = [next(micro_batches) for _ in range(setup.engine.micros)]
        label_count = count_labels(batches, setup.grid, setup.host)
        micro_batches = iter(batches)
    result = setup.engine.step(lambda _: model_inputs(run, next(micro_batches), setup.grid, step), lr, label_count, byte_counter)
    if result is not None:
        setup.engine.step_biases(result)
    return result


def log_step(
    run: Run, setup: TrainingSetup, step: FinishedStep, anomalies: Anomalies, meter: ThroughputMeter, *, logs: bool, evaluates: bool
) -> None:
    """Write the metrics of a finished step if it `logs` or is anomalous, and its validation losses if it `evaluates`."""
    row = anomalies.add_step(step.result, step.done)
    if row or logs:
        row = step_row(setup.start.after(run, step.done), step.result, step.lr, meter) | row
    if evaluates:
        row = {"step": step.done} | row | _validation_row(run, setup)
    if row and setup.sinks:
        setup.sinks.write(row)


def _validation_row(run: Run, setup: TrainingSetup) -> dict[str, Any]:
    """Evaluate the text that is held out and each validation set, with the average of the weights too where the run keeps one; return what
    a row has of them."""
    setup.channel.report_phase("evaluate")
    row = _validation_figures(run, setup, VALIDATION)
    if run.optim.ema:
        with setup.engine.averaged_weights():
            row |= _validation_figures(run, setup, f"{VALIDATION}{AVERAGED}")
    return row


def _validation_figures(run: Run, setup: TrainingSetup, of: str) -> dict[str, Any]:
    """Evaluate each set with the weights that forward has now; `of` stands before the figures' names."""
    on_progress, row = setup.channel.report_progress, dict[str, Any]()
    for each in setup.validations:
        found = evaluate(run, setup.engine, setup.grid, each.batches, each.samples, on_progress)
        row |= {key_of_set(f"{of}loss", each.name): finite_or_none(found.loss)}
        row |= preference_row(found.preferences, of=of, name=each.name) if found.preferences else {}
    return row


def is_due(every: int, done: int) -> bool:
    """Return whether something that happens every `every` steps (0: never) happens after step `done`."""
    return every > 0 and done % every == 0


def is_save_due(run: Run, done: int, last: int) -> bool:
    """Return whether a checkpoint is saved after step `done` of a run that ends at step `last`."""
    return is_due(run.checkpoint.every, done) or (done == last and run.checkpoint.final)


def no_steps_message(run: Run, first: int, last: int) -> str:
    """Return the message that a run has no step left, with the override that continues it."""
    longer = f"train.steps={2 * first}" if run.train.steps else f"train.tokens={2 * samples_before(run.train, first) * run.train.seq:g}"
    if first == last:
        return f"step {first} of {last} is done: nothing to train; set {longer} to train longer"
    return f"the newest checkpoint is of step {first}, and the run ends at step {last}: nothing to train; set {longer} to train longer"


def unsaved_message(saved: int, last: int) -> str:
    """Return the message that the last step could not be saved, with the step that the run resumes from."""
    resume = f"make room and start it again, and it resumes from step {saved}" if saved else "it has no checkpoint"
    return f"trained to step {last}, which could not be saved: {resume}"
