"""The state that training starts from: the newest checkpoint, Hugging Face weights, or the initial values of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from ...engines.engine import Engine
from ...launch.rank.channel import Channel, ignore_text
from ...parallel.process_groups import Grid
from ...rundir.checkpoints import checkpoints_folder
from ...rundir.resume_changes import Changes, compare_runs
from ...rundir.run_in_manifest import CONFIG_KEY, read_hf_config, run_from_record
from ...spec.derived.data_blends import blends
from ...spec.run import Run
from ...system.stop_requests import StopFlag
from ..checkpoint import Gather, SavedCheckpoint, choose_checkpoint
from ..checkpoint.shard_positions import weight_shapes
from ..data.samples.batches import Batches
from ..failures.fail_together import fail_together
from ..step.evaluate import Validation
from ..step.train_progress import BEGINNING, TrainProgress, resumed_progress
from .engine_state import dropped_errors, load_hf_weights, restore_engine
from .reference_pass import check_same_start, compute_reference, find_reference
from .resume_loss_check import check_resumed_loss
from .saver import LACKS_VALIDATION_KEY


class InitialState(NamedTuple):
    """A run's progress, recent figures of its steps (failures/anomalies.py) where its checkpoint has them, and whether a stop request left
    out the validation of its last step."""

    progress: TrainProgress
    recent: Mapping[str, Sequence[float]]
    lacks_validation: bool = False


def load_initial_state(
    run: Run,
    folder: Path,
    grid: Grid,
    engine: Engine,
    batches: Batches,
    validations: Sequence[Validation],
    channel: Channel,
    gather: Gather,
    host: dist.ProcessGroup,
    stop: StopFlag,
) -> InitialState:
    """Load the newest checkpoint that verifies into the engine, else model.weights if set, and report which. Give batches of preferences
    their reference, which is of the weights before a checkpoint is loaded.

    Raises AllRanksFailed where the checkpoint can't be loaded, or has another loss than it was saved with; StoppedInReference.
    """
    say = channel.say if grid.world.is_rank0 else ignore_text
    changes_since = partial(_changes_since, run, batches)
    choose = partial(choose_checkpoint, checkpoints_folder(folder), run.checkpoint.resume, weight_shapes(run), changes_since)
    on_ranks = partial(choose, rank=grid.world.rank, world=grid.world.size, gather=gather, on_progress=channel.report_progress)
    search = fail_together(gather, on_ranks)
    for reason in search.passed:
        say(f"passed over {reason}")
    reference = None
    if run.data.has_preferences and run.train.preference.has_reference:
        splits = [(batches, _samples_to_train(run, search.checkpoint, changes_since))]
        splits += [(each.batches, each.samples) for each in validations]
        if search.checkpoint:
            splits.append(_checked_samples(run, search.checkpoint, batches))
        reference = find_reference(run, folder, grid, splits, channel, host)
        fail_together(gather, partial(check_same_start, search.checkpoint, reference))
    begins = not search.checkpoint or (reference is not None and not reference.is_complete)
    if run.model.weights and (run.model.lora.rank or begins):  # LoRA's checkpoints hold what is trained alone
        adapter = run.model.lora.weights if begins and run.model.lora.rank else None
        fail_together(gather, partial(load_hf_weights, run, engine, channel.report_progress, adapter=adapter))
        engine.gather_restored()
        if not search.checkpoint or run.model.lora.rank:
            say(f"starts from the weights in {run.model.weights}{f', with the adapter in {adapter}' if adapter else ''}")
    if reference is not None:
        if not reference.is_complete:
            compute_reference(run, folder, grid, engine, reference, channel, host, stop)
        for each, _ in splits:
            reference.give(each)
    state = InitialState(BEGINNING, {})
    if search.checkpoint:
        state = _load_checkpoint(run, search.checkpoint, changes_since(search.checkpoint), grid, engine, batches, channel, gather)
    if reference is not None:
        engine.begin_training()
    return state


def _load_checkpoint(
    run: Run,
    checkpoint: SavedCheckpoint,
    changes: Changes,
    grid: Grid,
    engine: Engine,
    batches: Batches,
    channel: Channel,
    gather: Gather,
) -> InitialState:
    """Load a checkpoint into the engine, check its loss, and say what has changed since it was saved."""
    fail_together(gather, partial(restore_engine, engine, checkpoint, changes.new_moments, channel.report_progress))
    engine.gather_restored()
    channel.report_phase("compare")
    before = run_from_record(checkpoint.extra) or run
    check_resumed_loss(run, engine, grid, batches.with_blends(blends(before.data)), checkpoint.step, checkpoint.extra)
    dropped = dropped_errors(engine, checkpoint)
    if grid.world.is_rank0:
        for remark in filter(None, (*changes.remarks(checkpoint.step), dropped)):
            channel.say(remark)
        channel.say(f"resumes from step {checkpoint.step}")
    extra = checkpoint.extra
    return InitialState(_resumed(run, checkpoint, changes), extra.get("recent", {}), bool(extra.get(LACKS_VALIDATION_KEY)))


def _resumed(run: Run, checkpoint: SavedCheckpoint, changes: Changes) -> TrainProgress:
    """Return where a run resumes from a checkpoint."""
    before = run_from_record(checkpoint.extra) or run
    return resumed_progress(checkpoint.step, checkpoint.extra, before, run, other_data=changes.other_data)


def _samples_to_train(run: Run, checkpoint: SavedCheckpoint | None, changes_since: Callable[[SavedCheckpoint], Changes]) -> range:
    """Return the samples that the run trains on from here."""
    start = _resumed(run, checkpoint, changes_since(checkpoint)) if checkpoint else BEGINNING
    end = start.after(run, max(start.step, start.last_step(run))).sample + run.train.batch
    return range(start.sample, end)


def _checked_samples(run: Run, checkpoint: SavedCheckpoint, batches: Batches) -> tuple[Batches, range]:
    """Return the batches and the samples whose loss a checkpoint records, as the run that saved it read them."""
    before = run_from_record(checkpoint.extra) or run
    first, count = checkpoint.extra.get("first", {}).get("samples", (0, 0))
    return batches.with_blends(blends(before.data)), range(first, first + count)


def _changes_since(run: Run, batches: Batches, checkpoint: SavedCheckpoint) -> Changes:
    """Return what the run has changed since a checkpoint was saved. Checkpoints of earlier versions record the data's key alone."""
    extra = checkpoint.extra
    key = extra.get("data", {}).get("key")
    return compare_runs(
        run_from_record(extra) or run,
        run,
        step=checkpoint.step,
        samples=extra.get("samples"),
        same_data=None if key is None else key == batches.corpus.key,
        configs=(extra.get(CONFIG_KEY, {}), read_hf_config(run)),
    )
