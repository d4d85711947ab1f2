"""Where documents start, as linear attention reads it, as a change of an op table."""

from __future__ import annotations

from dataclasses import replace

from ...spec.run import Run
from .op_table import OpTable, Tensor

STARTS = Tensor(("batch", "keys"), 4)  # of every token of the sequence, on each of the ranks that share it


def with_document_starts(table: OpTable, run: Run) -> OpTable:
    """Return a table of a model with linear attention that saves where the documents of a micro-batch start, once for all layers."""
    if not run.data.documents or "linear_keys" not in table.sizes or run.model.layers_in_group == 1:
        return table
    first, *others = table.embedding
    return replace(table, embedding=(replace(first, saves_torch=(*first.saves_torch, STARTS)), *others))
