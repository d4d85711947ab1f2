"""Head and loss in chunks of the vocabulary, as a change of an op table: what is kept of them, and computed again in backward."""

from __future__ import annotations

from dataclasses import replace

from ...spec.run import Run
from .op_table import OpTable
from .shared_ops import STREAM


def with_loss_chunks(table: OpTable, run: Run) -> OpTable:
    """Return a table whose head and loss are computed in `train.loss_chunks` parts (trainer/layers/chunked_loss.py): their passes save the
    head's input, a frozen head's too, and what the loss saves of each token; no logits."""
    chunks = run.train.loss_chunks
    if chunks == 1 or not table.head:
        return table
    *others, head, loss = table.head
    of_tokens = tuple(each for each in loss.saves_torch if "vocab" not in each.dims)
    head = replace(head, chunks=chunks, kernels=chunks, saves_megatron=(STREAM,), saves_torch=(STREAM, *of_tokens))
    return replace(table, head=(*others, head, replace(loss, chunks=chunks, kernels=loss.kernels * chunks, saves_torch=())))
