"""A run's validation: what its row has of the text that is held out and of each validation set, and one that a stop request left out."""

from __future__ import annotations

from typing import Any

from ..parallel.world import any_rank
from ..rundir.metric_rows import AVERAGED, VALIDATION, key_of_set, read_step_rows, validation_losses
from ..spec.run import Run
from ..system.stop_requests import StopFlag
from .metrics.step_row import finite_or_none, preference_row
from .state.training_setup import TrainingSetup
from .step.evaluate import evaluate_unless_stopped


def validation_row(run: Run, setup: TrainingSetup, stop: StopFlag) -> dict[str, Any] | None:
    """Evaluate the text that is held out and each validation set, with the average of the weights too where the run keeps one; return what
    a row has of them, None on all ranks after a stop request."""
    setup.channel.report_phase("evaluate")
    row = _figures(run, setup, VALIDATION, stop)
    if row is not None and run.optim.ema:
        with setup.engine.averaged_weights():
            averaged = _figures(run, setup, f"{VALIDATION}{AVERAGED}", stop)
        row = None if averaged is None else row | averaged
    return row


def make_up_validation(run: Run, setup: TrainingSetup, stop: StopFlag) -> bool:
    """Make the validation that a stop request left out at the step from which the run resumes, and write its row, unless the last row of
    that step has it. Return False on all ranks after another stop request."""
    step = setup.start.step
    last: dict[str, Any] = next((row for row in reversed(read_step_rows(setup.folder)) if row.get("step") == step), {})
    is_missing = setup.world.is_rank0 and not validation_losses(last)
    if not any_rank(is_missing, setup.world.device):
        return True
    row = validation_row(run, setup, stop)
    if row is None:
        return False
    if setup.sinks:
        setup.sinks.write({"step": step} | row)
    return True


def _figures(run: Run, setup: TrainingSetup, of: str, stop: StopFlag) -> dict[str, Any] | None:
    """Evaluate each set with the weights that forward has now; `of` stands before the figures' names. None after a stop request."""
    on_progress, row = setup.channel.report_progress, dict[str, Any]()
    for each in setup.validations:
        found = evaluate_unless_stopped(run, setup.engine, setup.grid, each.batches, each.samples, on_progress, stop)
        if found is None:
            return None
        row |= {key_of_set(f"{of}loss", each.name): finite_or_none(found.loss)}
        row |= preference_row(found.preferences, of=of, name=each.name) if found.preferences else {}
    return row
