"""Bytes that the passes of a stage hold for a moment, beside those that are saved for backward."""

from __future__ import annotations

from ..layout.layout import StageKind
from .block_costs import BlockCosts
from .cost_context import CostContext


def stage_temporary_bytes(context: CostContext, blocks: BlockCosts, kind: StageKind) -> int:
    """Return the most bytes that the passes of a micro-batch hold beside all that they save: in the head, in the last layer, or when the
    embedding's gradient is made. With tied weights the head's gradient waits for the embedding's, and their sum is a third."""
    width, embedding, head = context.widths.weight, blocks.embedding, blocks.head
    waits = blocks.tied * width if kind.first and kind.last else 0
    ended = head.saved + head.logits if kind.last else 0
    most = [waits + blocks.layer.temporary - ended] if kind.layers else []
    if kind.last:
        most.append(head.temporary)
    if kind.first and not embedding.frozen:
        made = 3 * waits or embedding.dense * width
        most.append(made + blocks.stream - ended - kind.layers * blocks.layer.saved - embedding.saved)
    return max([0, *most])
