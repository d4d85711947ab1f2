"""What an engine holds becomes a checkpoint, and a checkpoint what an engine holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..engines.zero import ZeroEngine
from ..models.build import fill
from ..models.weights import from_hf
from ..parallel.world import World
from ..spec.run import Run
from .checkpoint import Checkpoint, SaveFailed, Shard, load, over, save, whole

BEGINNING = {"optimizer_steps": 0, "skipped": 0, "scale": {}}  # an engine's position before its first step


def keep(
    run: Run, engine: ZeroEngine, world: World, host: dist.ProcessGroup, folder: Path, step: int, say: Callable[[str], None]
) -> int | None:
    """Save after `step` steps and say so; None, and why, where that failed: training may go on."""
    extra = {"name": run.name, "samples": step * run.train.batch, "engine": engine.position()}
    try:
        saved = save(
            folder / "checkpoints",
            step,
            _shards(engine),
            extra=extra,
            keep=run.checkpoint.keep,
            rank=world.rank,
            world=world.size,
            gather=over(host),
        )
    except SaveFailed as error:
        if world.first:
            say(f"warning: {error}; training goes on")
        return None
    if world.first:
        say(f"saved step {step} in {saved.seconds['total']:.1f} s ({saved.bytes / 2**20:,.1f} MiB)")
        for note in saved.notes:
            say(f"warning: {note}")
    return step


def _shards(engine: ZeroEngine) -> Iterator[Shard]:
    for part in engine.partitions():
        for kind, held in (("weight", part.weight), *part.states()):
            yield Shard(slice=whole(part.name, kind, part.shape).part(part.start, part.length), tensor=held)


def restore(engine: ZeroEngine, checkpoint: Checkpoint) -> None:
    """Give an engine what a checkpoint of any layout holds."""

    def read(name: str, kind: str, shape: tuple[int, ...], start: int, length: int) -> Tensor:
        ((_, tensor),) = load(checkpoint, [whole(name, kind, shape).part(start, length)])
        return tensor

    engine.restore(read, checkpoint.extra["engine"])


def begin(engine: ZeroEngine, run: Run) -> None:
    """Give an engine that has not stepped the weights of the run's Hugging Face folder, in float32 where it keeps that.

    The folder's files are mapped: of them a rank reads what it holds. Raises Unreadable where they are another model's.
    """
    assert run.model.weights is not None
    given = dict(from_hf(run.model.weights, run))

    def read(name: str, kind: str, shape: tuple[int, ...], start: int, length: int) -> Tensor:
        if kind != "weight":
            return torch.zeros(length)
        logical = given[name]
        if tuple(logical.shape) != shape:  # its vocabulary is padded here
            logical = torch.empty(shape, dtype=logical.dtype)
            fill(logical, given[name])
        return logical.reshape(-1)[start : start + length]

    engine.restore(read, BEGINNING)
