"""The state that training starts from: the newest checkpoint, Hugging Face weights, or the initial values of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ...engines.engine import Engine
from ...launch.rank.channel import Channel, ignore_text
from ...parallel.process_groups import Grid
from ...rundir.changes import Changes, compare_runs
from ...rundir.run_in_manifest import CONFIG_KEY, read_hf_config, run_from_record
from ...spec.derived.data_blends import blends
from ...spec.run import Run
from ..checkpoint import Gather, SavedCheckpoint, choose_checkpoint
from ..checkpoint.shard_positions import weight_shapes
from ..data.samples.batches import Batches
from ..failures.fail_together import fail_together
from ..step.train_progress import BEGINNING, TrainProgress, resumed_progress
from .engine_state import dropped_errors, load_hf_weights, restore_engine
from .resume_loss_check import check_resumed_loss


class InitialState(NamedTuple):
    """A run's progress, and recent figures of its steps (failures/anomalies.py) where its checkpoint has them."""

    progress: TrainProgress
    recent: Mapping[str, Sequence[float]]


def load_initial_state(
    run: Run, folder: Path, grid: Grid, engine: Engine, batches: Batches, channel: Channel, gather: Gather
) -> InitialState:
    """Load the newest checkpoint that verifies into the engine, else model.weights if set, and report which.

    Raises AllRanksFailed where the checkpoint can't be loaded, or has another loss than it was saved with.
    """
    say = channel.say if grid.world.is_rank0 else ignore_text
    changes_since = partial(_changes_since, run, batches)
    choose = partial(choose_checkpoint, folder / "checkpoints", run.checkpoint.resume, weight_shapes(run), changes_since)
    on_ranks = partial(choose, rank=grid.world.rank, world=grid.world.size, gather=gather, on_progress=channel.report_progress)
    search = fail_together(gather, on_ranks)
    for reason in search.passed:
        say(f"passed over {reason}")
    if run.model.weights and (run.model.lora.rank or not search.checkpoint):  # LoRA's checkpoints hold what is trained alone
        fail_together(gather, partial(load_hf_weights, run, engine, grid, channel.report_progress))
        say(f"starts from the weights in {run.model.weights}")
    if search.checkpoint:
        return _load_checkpoint(run, search.checkpoint, changes_since(search.checkpoint), grid, engine, batches, channel, gather)
    return InitialState(BEGINNING, {})


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
    channel.report_phase("compare")
    before = run_from_record(checkpoint.extra) or run
    check_resumed_loss(run, engine, grid, batches.blended(blends(before.data)), checkpoint.step, checkpoint.extra)
    dropped = dropped_errors(engine, checkpoint)
    if grid.world.is_rank0:
        for remark in filter(None, (*changes.remarks(checkpoint.step), dropped)):
            channel.say(remark)
        channel.say(f"resumes from step {checkpoint.step}")
    progress = resumed_progress(checkpoint.step, checkpoint.extra, before, run, other_data=changes.other_data)
    return InitialState(progress, checkpoint.extra.get("recent", {}))


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
