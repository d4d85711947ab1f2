"""The arguments of a model's forward on this rank, and the labels of a step that count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...layers.counter_rng import dropout_keys
from ...layers.cross_entropy import IGNORED
from ...layers.preference_loss import PairInputs
from ...layers.transformer.context_parallel import ContextParallel
from ...layers.transformer.document_bounds import document_bounds
from ...layers.transformer.multi_token_prediction import further_arguments
from ...models.families import has_experts
from ...parallel.process_groups import Grid
from ...parallel.rank_model import context_parallel_of
from ...spec.run import Run
from ..data.samples.answer_pairs import AnswerPairs
from ..data.samples.batches import Batch


def model_inputs(run: Run, batch: Batch, grid: Grid, step: int | None) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return tokens, labels and keyword arguments of a model's forward, on the rank's device; without a step there is no dropout,
    and no module predicts further tokens.

    Under context parallelism tokens and labels are this rank's part of the sequence. Documents and dropout keys stay whole: attention
    may need those of other ranks' tokens. So do the labels that an auxiliary loss of experts weighs each sequence by.
    """
    device, context, seq = grid.world.device, context_parallel_of(run, grid), batch.tokens.shape[1]
    further: dict[str, Any] = {}
    if batch.documents is not None:
        further["documents"] = batch.documents.to(device, non_blocking=True)
        if run.train.attention == "flash" and not (run.model.dropout and step is not None):
            further["bounds"] = (batch.bounds or document_bounds(batch.documents)).to(device)
    if (run.model.dropout or run.model.lora.dropout) and step is not None:
        further["keys"] = dropout_keys(run.train.seed, step, batch.samples.to(device, non_blocking=True), torch.arange(seq, device=device))
    if has_experts(run.model) and run.model.adds_router_loss and (context is not None or batch.pairs is not None):
        further["label_counts"] = _counts_of_rows(batch).to(device, non_blocking=True)
    if batch.pairs is not None:
        further["pairs"] = pair_inputs(batch.pairs, batch.tokens, context, device)
    if step is not None and (shifted := further_arguments(run.model, batch.tokens, batch.labels, batch.documents)):
        rows = shifted["further"]
        own = rows if context is None else context.shard(rows.flatten(0, 2)).view(*rows.shape[:3], -1)
        further["further"] = own.to(device, non_blocking=True)
    tokens, labels = (each if context is None else context.shard(each) for each in (batch.tokens, batch.labels))
    return tokens.to(device, non_blocking=True), labels.to(device, non_blocking=True), further


def pair_inputs(pairs: AnswerPairs, tokens: Tensor, context: ContextParallel | None, device: torch.device) -> PairInputs:
    """Return the pairs of a micro-batch as the loss reads them; under context parallelism `starts` are among this rank's tokens."""
    starts = pairs.starts
    if context is not None:
        own = context.shard(torch.arange(tokens.numel()).view(tokens.shape))
        starts = torch.searchsorted(own.flatten(), starts)
    moved = (each.to(device, non_blocking=True) for each in (starts, pairs.labels.double(), pairs.reference))
    return PairInputs(**dict(zip(("starts", "labels", "reference"), moved, strict=True)))


def _counts_of_rows(batch: Batch) -> Tensor:
    """Return how many labels of each sequence count [B], or of preferences its pairs."""
    if batch.pairs is None:
        return (batch.labels != IGNORED).sum(1)
    rows, seq = batch.labels.shape
    return torch.bincount(batch.pairs.starts[:-1:2] // seq, minlength=rows)


def count_labels(batches: Sequence[Batch], grid: Grid, host: dist.ProcessGroup) -> int:
    """Return how many labels of the global batch count, not those that are IGNORED, or of preferences its pairs, from each rank's
    micro-batches."""
    count = torch.tensor(sum(int(_counts_of_rows(each).sum()) for each in batches))
    dist.all_reduce(count, group=host)
    return int(count) * grid.size("dp") // grid.world.size  # the ranks of a replica count the same labels
