"""Any other causal language model of Hugging Face's: its weights as transformers names and shapes them, and nothing of what it computes."""

from __future__ import annotations

from ...spec.run import Model, Train
from ..table import Op, Table, Weight, sizes

PREFIX = "hf."  # of its parameters' names: the module of trainer/models/auto/module.py holds the model as `hf`


def table(model: Model, train: Train) -> Table:
    """The table of such a model: one block with every weight, each dim named by its own size, so that no axis splits it."""
    stated = model.parameters or {}
    held = tuple(Weight(PREFIX + name, tuple(map(_dim, shape))) for name, shape in stated.items())
    own = {_dim(size): size for shape in stated.values() for size in shape}
    return Table(
        sizes={**sizes(model, train), **own},
        embedding=(Op(name="parameters", weights=held),),
        layer=(),
        head=(),
        tied=False,  # one weight of two names stands once already
        computes=False,
    )


def _dim(size: int) -> str:
    return f"of {size}"
