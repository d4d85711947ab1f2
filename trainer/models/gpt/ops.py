"""GPT-2 and GPT-3: LayerNorm before each half of a layer, learned positions."""

from __future__ import annotations

from ...spec.run import Model, Train
from ..blocks import attention, embedding, feed_forward, head, norm, residual
from ..table import Table, sizes


def table(model: Model, train: Train) -> Table:
    """The op table of a GPT."""
    layer = (
        norm("norm1", model),
        *attention(model, train),
        residual("attention.residual", model),
        norm("norm2", model),
        *feed_forward(model),
        residual("mlp.residual", model),
    )
    return Table(
        sizes=sizes(model, train),
        embedding=embedding(model),
        layer=layer,
        head=(norm("norm", model), *head(model)),
        tied=model.tied,
    )
