"""The state of an engine to and from checkpoints, and from Hugging Face weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...engines.engine import Engine
from ...engines.rank_parameter import ERROR
from ...launch.rank.channel import OnProgress
from ...models.families import is_made_by_transformers
from ...models.hf_format.adapter_reader import open_adapter
from ...models.hf_format.transformers_weights import open_published_weights
from ...models.hf_format.weights import open_hf_weights
from ...parallel.process_groups import Grid
from ...plan.axes.weight_slices import WeightShard
from ...plan.layout.checkpoint_kinds import AVERAGE, WEIGHT
from ...plan.layout.workers import OUTER_MOMENTUM
from ...spec.run import Run
from ..checkpoint import CheckpointReader, SavedCheckpoint, Shard, Slice
from ..checkpoint.shard_positions import checkpoint_shards, constant_shard, is_saved_here, read_range, slice_values, weight_shapes

UNTRAINED = {"optimizer_steps": 0, "skipped": 0, "scale": {}, "steps": 0}  # an engine's counters before its first step


def owned_shards(run: Run, engine: Engine, grid: Grid) -> Iterator[Shard]:
    """Yield the shards that this rank saves: views of the engine's float32 weights and optimizer states, without padding.

    Of several ranks that hold the same elements one saves them; of a tied weight's two copies, the embedding's is saved.
    """
    turns = {name: turn for turn, name in enumerate(weight_shapes(run))}
    for part in engine.optimizer_shards():
        replica, replicas = (grid.coordinate(part.copies), grid.size(part.copies)) if part.copies else (0, 1)
        if part.tied or not is_saved_here(part.shard, turns[part.shard.name], replica=replica, replicas=replicas):
            continue
        errors = [(ERROR, part.error)] if part.error is not None else []
        for kind, held in ((WEIGHT, part.weight), *part.states(), *errors):
            yield from checkpoint_shards(part.shard, kind, part.start, held, is_copy=part.is_widened(kind))
    for shard, tensor in _constant_shards(engine, grid):
        if is_saved_here(shard, turns[shard.name], replica=grid.coordinate("data"), replicas=grid.size("data")):
            yield from checkpoint_shards(shard, WEIGHT, 0, tensor.view(-1))


def _constant_shards(engine: Engine, grid: Grid) -> Iterator[tuple[WeightShard, Tensor]]:
    for name, tensor in engine.constants():
        yield constant_shard(name, tuple(tensor.shape), copy=grid.coordinate("tp"), copies=grid.size("tp")), tensor


def restore_engine(engine: Engine, checkpoint: SavedCheckpoint, new_moments: Sequence[str], on_progress: OnProgress) -> None:
    """Load a checkpoint of any layout into an engine; each rank reads its own slices. Raises LoadFailed.

    Optimizer moments of the kinds in `new_moments`, which the checkpoint does not hold, start at zero; with those of the optimizer itself
    Adam's step count does. So do errors of compressed gradients that it does not hold. An average of weights that it does not hold begins
    with its weights.
    """
    reader = CheckpointReader(checkpoint)

    def read(part: Slice) -> Tensor:
        on_progress("read")
        part = _source_of(part, has_average=reader.holds(part))
        is_new = part.kind in new_moments or (part.kind == ERROR and not reader.holds(part))
        return torch.zeros(part.count) if is_new else reader.read(part)

    counters = checkpoint.extra["engine"] | {"steps": checkpoint.step}
    if any(kind != OUTER_MOMENTUM for kind in new_moments):
        counters = counters | {"optimizer_steps": UNTRAINED["optimizer_steps"]}
    engine.restore(partial(read_range, read=read), counters, engine.run.model.is_trained)
    for shard, tensor in _constant_shards(engine, engine.grid):
        tensor.view(-1).copy_(read_range(shard, WEIGHT, 0, tensor.numel(), read=read))


def _source_of(part: Slice, *, has_average: bool) -> Slice:
    """Return what a slice is read from: an average of weights that is not there begins with the weights."""
    return replace(part, kind=WEIGHT) if part.kind == AVERAGE and not has_average else part


def dropped_errors(engine: Engine, checkpoint: SavedCheckpoint) -> str:
    """Say that a checkpoint holds errors of compressed gradients, and that the engine compresses none; "" where it keeps them."""
    is_there = any(row.kind == ERROR for row in checkpoint.manifest.tensors)
    if not is_there or any(each.error is not None for each in engine.optimizer_shards()):
        return ""
    return "what compression has left out of gradients until then is dropped: gradients travel whole now"


def load_hf_weights(run: Run, engine: Engine, on_progress: OnProgress, *, adapter: str | None) -> None:
    """Load model.weights, a Hugging Face folder, into an engine that has not stepped, in float32 where the engine keeps that, and LoRA's
    own weights from the folder of an adapter. Without one they keep their initial values, and so do modules for further tokens that
    model.weights lacks.

    Files are memory-mapped: each rank reads only its own slices, and dequantizes no others. Raises Unreadable where they hold another
    model.
    """
    assert run.model.weights is not None
    open_weights = open_published_weights if is_made_by_transformers(run.model) else open_hf_weights
    with ExitStack() as opened:
        there: dict[str, Any] = {**opened.enter_context(open_weights(Path(run.model.weights), run))}
        if adapter:
            there |= opened.enter_context(open_adapter(adapter, run))

        def read(part: Slice) -> Tensor:
            on_progress("read")
            part = _source_of(part, has_average=False)
            return slice_values(there[part.name], part) if part.kind == WEIGHT else torch.zeros(part.count)

        engine.restore(partial(read_range, read=read), UNTRAINED, there.__contains__)
        for name, constant in engine.constants():
            if name in there:  # a module that the folder lacks has zeros
                constant.copy_(there[name][tuple(map(slice, constant.shape))])
