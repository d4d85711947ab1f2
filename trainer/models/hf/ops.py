"""Family hf, any other causal language model of transformers: its weights as transformers names and shapes them, and nothing else."""

from __future__ import annotations

from ...spec.run import Model, Train
from ..ops.op_table import Op, OpTable, Weight, logical_sizes

PREFIX = "hf."  # of its parameters' names: trainer/models/hf/module.py holds transformers' model as `hf`


def table(model: Model, train: Train) -> OpTable:
    """The op table of such a model: one op with every weight. Each dim is named by its own size, so that no axis splits it."""
    shapes = model.parameters or {}
    weights = tuple(Weight(PREFIX + name, tuple(map(_dim, shape))) for name, shape in shapes.items())
    own_dims = {_dim(size): size for shape in shapes.values() for size in shape}
    return OpTable(
        sizes={**logical_sizes(model, train), **own_dims},
        embedding=(Op(name="parameters", weights=weights),),
        layer=(),
        head=(),
        tied=False,  # transformers lists a tied weight once
        has_costs=False,
    )


def _dim(size: int) -> str:
    return f"of {size}"
