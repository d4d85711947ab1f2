"""The rule of `train.loss_chunks`: our own head has a vocabulary to cut."""

from __future__ import annotations

from collections.abc import Iterator

from ...models.families import is_made_by_transformers
from ...models.ops.op_table import round_up
from ...spec.derived.loss_chunks import CHUNK_MULTIPLE, most_chunks
from ...spec.run import Parallel, Run
from .broken_rule import BrokenRule


def loss_chunks_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A rank's part of the vocabulary has as many chunks; a model made by transformers computes its logits itself."""
    chunks, multiple = run.train.loss_chunks, run.model.vocab_multiple
    if chunks == 1:
        return
    if is_made_by_transformers(run.model):
        says = f"train.loss_chunks={chunks}: transformers computes all logits of family {run.model.family} at once"
        yield BrokenRule("loss_chunks", says, ((("train.loss_chunks", 1),),))
        return
    columns = round_up(run.model.vocab, multiple * parallel.tp) // parallel.tp
    most = most_chunks(columns)
    if chunks > most:
        says = f"train.loss_chunks={chunks}: a rank's {columns} tokens of the vocabulary have {most} chunks of {CHUNK_MULTIPLE}"
        yield BrokenRule("loss_chunks", says, ((("train.loss_chunks", most),),))
