"""The loss that a checkpoint was saved with, on the samples that come next: what is loaded, in whatever layout, must give it again."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from ..engines.engine import Engine
from ..parallel.process_groups import Grid
from ..spec.run import Run
from .checkpoint import LoadFailed
from .data.batches import Batches
from .evaluate import evaluated
from .failure import AllFailed

EXACT, HALF = 1e-4, 2e-2  # of the loss, between any two layouts: float32 (1e-7 was seen), and half precision (2e-4)
LEAST = 0.1  # nats: a loss below is what is left when logits that are much larger are taken off each other, with their rounding


class Departed(LoadFailed, AllFailed):
    """What was loaded has another loss than it was saved with."""


def tolerance(loss: float, *precisions: str) -> float:
    """Nats by which the loss that two runs of these precisions have of the same weights may differ."""
    return (EXACT if set(precisions) == {"fp32"} else HALF) * max(abs(loss), LEAST)


def data_of(run: Run, batches: Batches) -> dict[str, Any]:
    """What decides which tokens sample n is, and which of its labels count."""
    corpus = batches.corpus
    return {"key": corpus.key, "documents": corpus.documents, "seed": run.train.seed, "seq": run.train.seq}


def noted(run: Run, engine: Engine, grid: Grid, batches: Batches, first: int) -> dict[str, Any]:
    """What a checkpoint says of its data, and of the loss of the first round of samples from number `first` on.

    That is one forward of a micro-batch, on every rank: of a step with m micro-batches about 1 / 3m.
    """
    count = grid.size("dp") * run.train.microbatch
    loss = evaluated(run, engine, grid, batches, range(first, first + count))
    said: dict[str, Any] = {"data": data_of(run, batches)}
    if isfinite(loss):
        said["first"] = {"samples": [first, count], "loss": loss, "precision": run.train.precision}
    return said


def compared(run: Run, engine: Engine, grid: Grid, batches: Batches, step: int, extra: Mapping[str, Any]) -> None:
    """Evaluate the samples that a checkpoint has its loss of, on all ranks; raises Departed where it is another now.

    Where its samples are not this run's (other tokens, another seed, another length) there is nothing to compare.
    """
    if extra.get("data", data_of(run, batches)) != data_of(run, batches) or "first" not in extra:
        return
    saved, (first, count) = extra["first"], extra["first"]["samples"]
    loss = evaluated(run, engine, grid, batches, range(first, first + count))
    if not abs(loss - saved["loss"]) <= tolerance(saved["loss"], saved["precision"], run.train.precision):
        raise Departed(
            f"step {step} was saved with a loss of {saved['loss']:.4f} on its next {count} sequences, and loads with {loss:.4f}: "
            "not what was saved (the model is computed in another way than it was, or this is a fault of distrain's)"
        )
