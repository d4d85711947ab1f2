"""BERT: a bidirectional encoder with segments, norms after each half of a layer, and a masked-token head (arXiv:1810.04805)."""

from __future__ import annotations

from ...spec.run import Model, Train
from ..blocks import STREAM, attention, embedding, feed_forward, head, linear, norm, residual
from ..table import Op, Table, sizes


def table(model: Model, train: Train) -> Table:
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
        linear("transform", ("hidden",), (("", ("hidden",)),), bias=True, kept=(STREAM,)),
        Op(name="transform.act", moves=(STREAM, STREAM), kept=(STREAM,)),
        norm("transform.norm", model),
    )
    return Table(
        sizes=sizes(model, train),
        embedding=(*embedding(model, types=True), norm("embedding.norm", model)),
        layer=layer,
        head=(*transform, *head(model, bias=True)),
        tied=model.tied,
    )
