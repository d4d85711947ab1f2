"""Where documents start, as linear attention reads it, as a change of an op table."""

from __future__ import annotations

from dataclasses import replace

from ...spec.run import Run
from .op_table import Op, OpTable, Tensor

STARTS = Tensor(("batch", "keys"), 4)  # of every token of the sequence, on each of the ranks that share it
START_KERNELS, START_PASSES = 39, 6.0  # counted: of a pass of the rule, and of what convolutions move


def with_document_starts(table: OpTable, run: Run) -> OpTable:
    """Return a table of a model with linear attention that saves where the documents of a micro-batch start, once for all layers, and whose
    convolutions and rule compare them. The kernels of package fla take their bounds, which are a few numbers."""
    own = run.data.documents and run.train.linear_attention == "torch"
    if not own or "linear_keys" not in table.sizes or run.model.layers_in_group == 1:
        return table
    first, *others = table.embedding
    table = replace(table, embedding=(replace(first, saves_torch=(*first.saves_torch, STARTS)), *others))
    return table.replace_ops(lambda op: (_with_comparisons(op),))


def _with_comparisons(op: Op) -> Op:
    """Return an op of a layer, which where it is a part of linear attention keeps documents apart."""
    match op.name:
        case "attention.conv":
            return replace(op, eager_passes=op.eager_passes + START_PASSES)
        case "attention.delta":
            return replace(op, kernels=op.kernels + START_KERNELS)
        case _:
            return op
