"""GPT-2 and GPT-3: LayerNorm before each half of a layer, learned positions."""

from __future__ import annotations

from ...spec.run import Model, Train
from ..ops.op_table import OpTable
from ..ops.shared_ops import attention, decoder_table, feed_forward


def table(model: Model, train: Train) -> OpTable:
    """The op table of a GPT."""
    return decoder_table(model, train, attention(model, train), feed_forward(model))
