"""The resume check: a loaded checkpoint, in any layout, must give the loss that was recorded with it on the samples that come next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

from ...engines.engine import Engine
from ...parallel.process_groups import Grid
from ...spec.run import Run
from ..checkpoint import LoadFailed
from ..data.samples.batches import Batches
from ..failures.failure import AllRanksFailed
from ..step.evaluate import evaluate

# Relative to the loss, between any two layouts; 1e-7 was measured in float32 and 2e-4 in half precision.
FP32_TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
MIN_LOSS = 0.1  # nats; a smaller loss is a difference of much larger logits, and mostly their rounding


class ResumeMismatch(LoadFailed, AllRanksFailed):
    """The loaded checkpoint has another loss than the one it was saved with."""


def tolerance(loss: float, *precisions: str) -> float:
    """Return by how many nats the losses of the same weights may differ between runs of these precisions."""
    return (FP32_TOLERANCE if set(precisions) == {"fp32"} else HALF_TOLERANCE) * max(abs(loss), MIN_LOSS)


def data_identity(run: Run, batches: Batches) -> dict[str, Any]:
    """Return everything that determines the tokens of sample n and which of its labels count; of preferences the loss of its pairs."""
    corpus = batches.corpus
    pairs = {"preference": asdict(run.train.preference), "reference": dict(batches.reference_identity)} if corpus.has_pairs else {}
    return {"key": corpus.key, "documents": corpus.documents, "seed": run.train.seed, "seq": run.train.seq, **pairs}


def resume_check_record(run: Run, engine: Engine, grid: Grid, batches: Batches, first: int) -> dict[str, Any]:
    """Return what a checkpoint records for the check: its data, and the loss of the first round of samples from `first` on.

    It costs the forward of one micro-batch through all stages.
    """
    count = grid.size("dp") * run.train.microbatch
    loss = evaluate(run, engine, grid, batches, range(first, first + count)).loss
    recorded: dict[str, Any] = {"data": data_identity(run, batches)}
    if isfinite(loss):
        recorded["first"] = {"samples": [first, count], "loss": loss, "precision": run.train.precision}
    return recorded


def mismatch_reason(run: Run) -> str:
    """Return why a checkpoint's loss may differ now, and what to do: with LoRA, whose checkpoints hold the additions alone, the frozen
    weights come first."""
    if run.model.lora.rank and run.model.weights:
        return f"the frozen weights in {run.model.weights} may not be those that it was trained with: put these back"
    return "the model is computed in another way now, or this is a bug of distrain: use the version that saved it, and please report it"


def check_resumed_loss(run: Run, engine: Engine, grid: Grid, batches: Batches, step: int, extra: Mapping[str, Any]) -> None:
    """Evaluate the samples whose loss a checkpoint records, on all ranks. Raises ResumeMismatch where the loss differs.

    Without a recorded loss, or with other data, seed or sequence length, there is nothing to compare.
    """
    if extra.get("data", data_identity(run, batches)) != data_identity(run, batches) or "first" not in extra:
        return
    saved, (first, count) = extra["first"], extra["first"]["samples"]
    loss = evaluate(run, engine, grid, batches, range(first, first + count)).loss
    if not abs(loss - saved["loss"]) <= tolerance(saved["loss"], saved["precision"], run.train.precision):
        raise ResumeMismatch(
            f"step {step} was saved with a loss of {saved['loss']:.4f} on its next {count} sequences, and loads with {loss:.4f}: "
            f"{mismatch_reason(run)}"
        )
