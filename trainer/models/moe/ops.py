"""Mixtral: a Llama whose feed-forward is a mixture of experts (arXiv:2401.04088)."""

from __future__ import annotations

from ...spec.run import Model, Train
from ..ops.op_table import OpTable, logical_sizes
from ..ops.shared_ops import attention, embedding, head, mixture, norm, residual


def table(model: Model, train: Train) -> OpTable:
    """The op table of a mixture of experts."""
    layer = (
        norm("norm1", model),
        *attention(model, train),
        residual("attention.residual", model),
        norm("norm2", model),
        *mixture(model),
        residual("mlp.residual", model),
    )
    return OpTable(
        sizes=logical_sizes(model, train),
        embedding=embedding(model, train),
        layer=layer,
        head=(norm("norm", model), *head(model)),
        tied=model.tied,
    )
