"""BERT: a bidirectional encoder with segments, a norm after each half of a layer, and a masked-token head (arXiv:1810.04805)."""

from __future__ import annotations

from ...spec.run import Model, Train
from ..ops.op_table import Op, OpTable, logical_sizes
from ..ops.shared_ops import STREAM, attention, embedding, feed_forward, head, linear, norm, residual


def table(model: Model, train: Train) -> OpTable:
    """The op table of a BERT with the masked-language-model head."""
    layer = (
        *attention(model, train, causal=False),
        residual("attention.residual", model),
        norm("norm1", model),
        *feed_forward(model),
        residual("mlp.residual", model),
        norm("norm2", model),
    )
    transform = (
        linear("transform", ("hidden",), (("", ("hidden",)),), bias=True, saves=(STREAM,)),
        Op(name="transform.act", moves=(STREAM, STREAM), saves_megatron=(STREAM,)),
        norm("transform.norm", model),
    )
    return OpTable(
        sizes=logical_sizes(model, train),
        embedding=(*embedding(model, train, types=True), norm("embedding.norm", model)),
        layer=layer,
        head=(*transform, *head(bias=True)),
        tied=model.tied,
    )
