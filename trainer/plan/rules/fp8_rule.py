"""The rule of `train.precision=fp8`: GPUs multiply 8-bit floats in blocks."""

from __future__ import annotations

from collections.abc import Iterator

from ...models.families import FAMILIES, is_made_by_transformers, op_table
from ...models.ops.fp8 import is_cast_output
from ...spec.run import PAPERS_NAME, Parallel, Run
from ..axes import tp
from ..costs.local_tensors import LocalTensors, block_split
from .broken_rule import BrokenRule

MULTIPLE = 16  # elements; of the rows, the columns and the inner dim of a product (torch._scaled_mm)


def fp8_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """The sides of each product that a rank computes in fp8 are multiples of 16, on a CPU too."""
    if run.train.precision != "fp8" or run.engine == PAPERS_NAME or run.model.family not in FAMILIES or is_made_by_transformers(run.model):
        return
    if any(getattr(run.model, key) is None for key in FAMILIES[run.model.family].needs):
        return  # without these sizes it has no table, as model_rule says
    table, split = op_table(run), block_split(parallel, microbatch, "torch", fused=False)
    local = LocalTensors(table, split, vocab_multiple=run.model.vocab_multiple, activation=2, form="torch")
    for op in (*table.dense_layer, *table.layer):
        if not op.in_fp8 or op.product is None:
            continue
        rows = local.count(op.product.rows, without="tp" if tp.split_style(op) else "")
        sides = [
            ("rows", rows),
            *(("columns", local.count(dims)) for dims in (op.product.inner, *filter(is_cast_output, op.product.outers))),
        ]
        for noun, size in sides:
            if size % MULTIPLE:
                says = f"train.precision=fp8 multiplies in blocks of {MULTIPLE}: {op.name} has {size} {noun} on a rank"
                yield BrokenRule("fp8", says, ((("train.precision", "bf16"),),))
                return
