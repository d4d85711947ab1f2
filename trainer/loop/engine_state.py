"""What an engine holds becomes a checkpoint, and a checkpoint what an engine holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..engines.engine import Engine
from ..launch.rank.channel import Pulse, Talk
from ..models.weights import from_hf
from ..parallel.process_groups import Grid
from ..rundir.record import record
from ..spec.run import Run
from .checkpoint import Checkpoint, Reader, SaveFailed, Shard, Slice, over, save
from .data.batches import Batches
from .placement import run_of, saves, shards, taken, whole_model
from .position import Position
from .resume_check import noted

BEGINNING = {"optimizer_steps": 0, "skipped": 0, "scale": {}}  # an engine's position before its first step


def keep(
    run: Run, engine: Engine, grid: Grid, batches: Batches, host: dist.ProcessGroup, folder: Path, position: Position, talk: Talk
) -> int | None:
    """Save after the steps of a position and say so; None, and why, where that failed: training may go on.

    With it goes the loss of the samples that come next (firstloss.py), which costs one forward of a micro-batch.
    """
    extra = {"name": run.name, **position.extra(), "engine": engine.position(), **record(run)}
    extra |= noted(run, engine, grid, batches, position.sample)
    world, step = grid.world, position.step
    try:
        saved = save(
            folder / "checkpoints",
            step,
            owned(run, engine, grid),
            extra=extra,
            keep=run.checkpoint.keep,
            rank=world.rank,
            world=world.size,
            gather=over(host),
            pulse=talk.pulse,
        )
    except SaveFailed as error:
        if world.first:
            talk.say(f"warning: {error}; training goes on")
        return None
    if world.first:
        talk.say(f"saved step {step} in {saved.seconds['total']:.1f} s ({saved.bytes / 2**20:,.1f} MiB)")
        for note in saved.notes:
            talk.say(f"warning: {note}")
    return step


def owned(run: Run, engine: Engine, grid: Grid) -> Iterator[Shard]:
    """What this rank saves: views of what the engine holds, without padding and without what another rank saves.

    Of a tied weight's two copies, that of its own stage is saved.
    """
    turns = {name: turn for turn, name in enumerate(whole_model(run))}
    replica, replicas = grid.place("data"), grid.size("data")
    for part in engine.partitions():
        several = {} if part.alone else {"replica": replica, "replicas": replicas}
        if part.tied or not saves(part.placed, turns[part.placed.name], **several):
            continue
        for kind, held in (("weight", part.weight), *part.states()):
            yield from shards(part.placed, kind, part.start, held)


def restore(engine: Engine, checkpoint: Checkpoint, new_moments: Sequence[str], pulse: Pulse) -> None:
    """Give an engine what a checkpoint of any layout holds: each rank reads its own slices. Raises LoadFailed.

    Moments of the kinds in `new_moments`, which it does not hold, begin at zero, and so does Adam's count of its steps with them.
    """
    reader = Reader(checkpoint)

    def read(part: Slice) -> Tensor:
        pulse("read")
        return torch.zeros(part.count) if part.kind in new_moments else reader.read(part)

    position = checkpoint.extra["engine"]
    if new_moments:
        position = position | {"optimizer_steps": BEGINNING["optimizer_steps"]}
    engine.restore(partial(run_of, read=read), position)


def begin(run: Run, engine: Engine, grid: Grid, pulse: Pulse) -> None:
    """Give an engine that has not stepped the weights of the run's Hugging Face folder, in float32 where it keeps that.

    The folder's files are mapped: of them a rank reads what it holds. Raises Unreadable where they are another model's.
    """
    assert run.model.weights is not None
    mine = {placed.name for part in grid.seat.parts for placed in grid.seat.holds(run, part)}
    there = {name: tensor for name, tensor in from_hf(run.model.weights, run) if name in mine}

    def read(part: Slice) -> Tensor:
        pulse("read")
        return taken(there[part.name], part) if part.kind == "weight" else torch.zeros(part.count)

    engine.restore(partial(run_of, read=read), BEGINNING)
