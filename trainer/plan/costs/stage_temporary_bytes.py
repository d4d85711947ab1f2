"""Bytes that the passes of a stage hold for a moment, beside those that are saved for backward."""

from __future__ import annotations

from ..layout.layout import StageKind
from .block_costs import BlockCosts
from .cost_context import CostContext
from .number_or_array import larger


def stage_temporary_bytes(context: CostContext, blocks: BlockCosts, kind: StageKind) -> int:
    """Return the most bytes that the passes of a micro-batch hold beside all that they save: in the head, in the last layer, in the last
    dense layer, or when the embedding's gradient is made. With tied weights the head's gradient waits for the embedding's, and their sum
    is a third."""
    width, embedding, head = context.widths.weight, blocks.embedding, blocks.head
    waits = blocks.tied_gradient * width * (kind.first * kind.last)
    ended = (head.saved + head.logits) * kind.last
    in_layers = (waits + blocks.layer.temporary - ended) * (kind.layers > 0)
    if blocks.dense_layer:
        in_layers = larger(in_layers, (waits + blocks.dense_layer.temporary - ended - kind.layers * blocks.layer.saved) * kind.first)
    made = 3 * waits + embedding.dense * width * (waits == 0)
    in_embedding = (
        (made + blocks.stream - ended - kind.layers * blocks.layer.saved - blocks.first.saved) * kind.first * (embedding.frozen == 0)
    )
    return larger(larger(0, in_layers), larger(head.temporary * kind.last, in_embedding))
