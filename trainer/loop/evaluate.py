"""Batches as a rank's device takes them, and the loss of a range of samples: forward only, the same in every layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..engines.engine import Engine
from ..launch.rank.channel import Pulse, hush
from ..layers.keyed_random import keys
from ..parallel.process_groups import Grid
from ..parallel.rank_model import context_of
from ..spec.run import Run
from .data.batches import IGNORED, Batch, Batches


def given(run: Run, batch: Batch, grid: Grid, step: int | None) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Tokens, labels and further arguments of a model's forward, as far as this rank has the sequence; without a step there is no
    dropout. Documents stay whole: where one starts, another rank may have."""
    device, context, seq = grid.world.device, context_of(grid), batch.tokens.shape[1]
    further: dict[str, Any] = {}
    if batch.documents is not None:
        further["documents"] = batch.documents.to(device, non_blocking=True)
    if run.model.dropout and step is not None:
        positions = torch.arange(seq, device=device) if context is None else context.positions(seq, device)
        further["keys"] = keys(run.train.seed, step, batch.samples.to(device), positions)
    tokens, labels = (each if context is None else context.own(each) for each in (batch.tokens, batch.labels))
    return tokens.to(device, non_blocking=True), labels.to(device, non_blocking=True), further


def evaluated(run: Run, engine: Engine, grid: Grid, batches: Batches, samples: range, pulse: Pulse = hush) -> float:
    """Mean loss (nats a token) of samples, on all ranks at once, each its share.

    In rounds of dp x microbatch samples, always of full micro-batches: what a round has beyond the samples is not counted.
    """
    each, dp = run.train.microbatch, grid.size("dp")
    sums = torch.zeros(2, dtype=torch.float64, device=grid.world.device)
    for first in range(samples.start, samples.stop, dp * each):
        batch = batches.batch(first + grid.place("dp") * each, each)
        batch.labels[batch.samples >= samples.stop] = IGNORED
        tokens, labels, further = given(run, batch, grid, None)
        loss, counted = engine.evaluate(tokens, labels, **further)
        sums += torch.stack([loss.double(), counted.double()])
        pulse("evaluate")
    dist.all_reduce(sums)  # ranks that share tokens all say the same of them, or nothing: it is a mean either way
    return float(sums[0] / sums[1])
