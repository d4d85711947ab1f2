"""GPT-2 and GPT-3: LayerNorm before each half of a layer, learned positions."""

from __future__ import annotations

from ...spec.run import Model, Train
from ..ops.op_table import OpTable, logical_sizes
from ..ops.shared_ops import attention, embedding, feed_forward, head, norm, residual


def table(model: Model, train: Train) -> OpTable:
    """The op table of a GPT."""
    layer = (
        norm("norm1", model),
        *attention(model, train),
        residual("attention.residual", model),
        norm("norm2", model),
        *feed_forward(model),
        residual("mlp.residual", model),
    )
    return OpTable(
        sizes=logical_sizes(model, train),
        embedding=embedding(model, train),
        layer=layer,
        head=(norm("norm", model), *head(model)),
        tied=model.tied,
    )
