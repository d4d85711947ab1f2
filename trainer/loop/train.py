"""The training loop."""

from __future__ import annotations

from collections.abc import Iterator

from ..engines.engine import StepResult
from ..engines.held_bytes import ByteCounter
from ..launch.rank.channel import STOPPED_UNSAVED
from ..parallel.world import StopVote, any_rank
from ..spec.derived.batch_levels import samples_before
from ..spec.run import Run
from ..spec.sections.lr_schedule import learning_rate
from ..system.stop_requests import StopFlag
from .data.samples.batches import Batch, microbatch_samples, prefetch
from .devices.device_checks import DeviceChecks
from .failures.anomalies import Anomalies
from .failures.failure import AllRanksFailed
from .measure.instrumentation import Instruments
from .metrics.step_row import step_row
from .metrics.throughput import ThroughputMeter
from .state.saver import Saver
from .state.training_setup import TrainingSetup
from .step.model_inputs import count_labels, model_inputs
from .step.step_results import FinishedStep, StepResults
from .validate import make_up_validation, validation_row


class LastStepNotSaved(AllRanksFailed):
    """The run has reached its last step, and its checkpoint could not be saved."""


def train(run: Run, setup: TrainingSetup, stop: StopFlag) -> bool:
    """Train to the last step, or to the last one that a trace needs, and return True. Return False after a stop request: once a checkpoint
    is saved, or before the first step of a run that resumed.

    Raises TooManySkippedSteps, DeviceFault or LastStepNotSaved on all ranks, and SystemExit if the checkpoint of a stop request can't be
    saved.
    """
    first, last = setup.start.step, setup.start.last_step(run)
    if setup.lacks_validation and is_validation_due(run, setup, first, last) and not make_up_validation(run, setup, stop):
        return False
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
    stop_vote = StopVote(setup.world.device, late=1 if setup.engine.late_steps else 0)
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
            lacks_validation = is_validation_due(run, setup, done, last)
            evaluates = lacks_validation and not stopping
            saves = stopping or is_save_due(run, done, last)
            finished = results.finish([result, *(setup.engine.flush() if evaluates or saves or is_last else ())])
            instruments.report(done, finished[-1] if finished else None)
            saver.report()

            for each in finished:
                logs = each.done == last or stopping or is_due(run.log.every, each.done)
                evaluated_until = stop if evaluates and each.done == done else None
                if log_step(run, setup, each, anomalies, instruments.meter, logs=logs, evaluated_until=evaluated_until):
                    lacks_validation = False
                anomalies.raise_if_too_many(each.result, each.done)

            if evaluates:  # a stop request that came meanwhile needs no other step
                stopping = lacks_validation or (not is_last and stop_vote.vote_now(requested=stop.requested))
                saves = saves or stopping
            if devices.is_due(done):
                saver.finish()  # a check that finds a fault names the checkpoints since the one before
                devices.check(done)
            if saves:
                progress, recent = setup.start.after(run, done), anomalies.recent_figures()
                saver.save(progress, recent, devices.checked, lacks_validation=lacks_validation)
                if not (stopping or is_last) and stop_vote.vote_now(requested=stop.requested):
                    saver.finish(at_end=True)
                    stopping = saver.newest == done  # one that has failed is tried again after the next step
            if stopping and not is_last:
                saver.finish(at_end=True)
                if saver.newest < done:
                    raise SystemExit(STOPPED_UNSAVED)
                return False
            if stopping and lacks_validation:
                saver.finish(at_end=True)
                if setup.world.is_rank0 and saver.newest == last:
                    setup.channel.say("stopped in its last step: the same command makes the validation that was left out")
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
    run: Run,
    setup: TrainingSetup,
    step: FinishedStep,
    anomalies: Anomalies,
    meter: ThroughputMeter,
    *,
    logs: bool,
    evaluated_until: StopFlag | None,
) -> bool:
    """Write the metrics of a finished step if it `logs` or is anomalous, and its validation losses if it is evaluated: until a stop
    request, with which it is logged without them. Return whether it was evaluated."""
    row, validation = anomalies.add_step(step.result, step.done), None
    if row or logs:
        row = step_row(setup.start.after(run, step.done), step.result, step.lr, meter) | row
    if evaluated_until:
        validation = validation_row(run, setup, evaluated_until)
        if validation is None and not row:
            row = step_row(setup.start.after(run, step.done), step.result, step.lr, meter)
        row = {"step": step.done} | row | (validation or {})
    if row and setup.sinks:
        setup.sinks.write(row)
    return validation is not None


def is_validation_due(run: Run, setup: TrainingSetup, done: int, last: int) -> bool:
    """Return whether a validation belongs to step `done` of a run that ends at step `last`."""
    return bool(setup.validations) and (done == last or is_due(run.train.evaluate.every, done))


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
