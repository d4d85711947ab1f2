"""What the lengths of documents make of a plan."""

from __future__ import annotations

from ..spec.derived.document_pairs import document_lengths, mean_pairs
from .costs.attention_core import kernel_documents, uneven_parts
from .costs.cost_context import CostContext
from .costs.local_tensors import block_split
from .layout.layout import Layout
from .layout_cost import LayoutCost
from .plan_data import DocumentsPlan
from .replica_wait import replica_wait_seconds


def plan_documents(context: CostContext, layout: Layout, cost: LayoutCost) -> DocumentsPlan | None:
    """Return what the documents' lengths make of a layout's plan; None where they are not stated, or documents are not kept apart."""
    run, lengths = context.run, document_lengths(context.run)
    if lengths is None:
        return None
    split = block_split(layout.parallel, layout.microbatch, layout.form, fused=layout.fused)
    own = layout.form != "megatron"
    return DocumentsPlan(
        tokens=lengths.mean,
        pairs=mean_pairs(lengths, run.train.seq) / run.train.seq**2,
        computed=kernel_documents(run) is not None,
        wait=replica_wait_seconds(context, layout, cost.blocks, cost.kinds[0].messages) if cost.seconds else None,
        slowest=uneven_parts(run, split, context.own_rates if own else context.rates),
    )
