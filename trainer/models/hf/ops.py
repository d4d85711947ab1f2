"""Family hf, any other causal language model of transformers: its weights as transformers names and shapes them, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from ...spec.run import Model, Train
from ..ops.op_table import Dims, Op, OpTable, Weight, logical_sizes

LAYER = re.compile(r".*?\.\d+\.")  # of a parameter's name, up to the number of its layer
PREFIX = "hf."  # of its parameters' names: trainer/models/hf/module.py holds transformers' model as `hf`


def table(model: Model, train: Train) -> OpTable:
    """The op table of such a model: one op with every weight. Each dim is named by its own size, so that no axis splits it; the experts of
    a layer are named as such, for a token uses some of them."""
    shapes = model.parameters or {}
    weights = tuple(Weight(PREFIX + name, _dims(name, shape, model.experts)) for name, shape in shapes.items())
    own_dims = {_dim(size): size for shape in shapes.values() for size in shape}
    return OpTable(
        sizes={**logical_sizes(model, train), **own_dims},
        embedding=(Op(name="parameters", weights=weights),),
        layer=(),
        head=(),
        tied=False,  # transformers lists a tied weight once
        has_costs=False,
        largest_layer=_largest_layer(shapes),
    )


def _largest_layer(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the elements of the largest layer, or of the largest module outside of layers (an embedding, the head)."""
    totals: dict[str, int] = {}
    for name, shape in shapes.items():
        layer = LAYER.match(name)
        module = layer[0] if layer else name.rpartition(".")[0]
        totals[module] = totals.get(module, 0) + prod(shape)
    return max(totals.values(), default=0)


def is_of_experts(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter of transformers holds the matrices of all experts of a layer, one after another."""
    return ".experts." in name and len(shape) == 3


def _dims(name: str, shape: tuple[int, ...], experts: int) -> Dims:
    if experts and is_of_experts(name, shape) and shape[0] == experts:
        return ("experts", *map(_dim, shape[1:]))
    return tuple(map(_dim, shape))


def _dim(size: int) -> str:
    return f"of {size}"
