"""Sums over the tensor axis, once an update, of gradients of which each rank has only a part.

Under sequence parallelism each rank has its own tokens' part of a replicated weight's gradient (arXiv:2205.05198 leaves these out).
With fewer key and value heads than ranks, each rank that holds a head has the part of its own query heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from .axes import tp
from .axes.traffic_row import TrafficRow
from .axes.weight_slices import TensorCopies
from .costs.block_costs import BlockCosts
from .costs.cost_context import CostContext
from .engines import cost_model
from .layout.layout import Layout, StageKind


def traffic_rows(context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind, data: int | None = None) -> list[TrafficRow]:
    """One message a sum, on the data-parallel rank `data` of a kind of stage; None: on the one that sends most."""
    rows, engine = [], cost_model(layout.engine)
    for group, copies in _sums(layout, blocks):
        if elements := engine.summed_elements(context, layout, blocks, kind, copies, data):
            wire = layout.wires.axes["tp"] if copies == "replicated" else context.kv_copies_wire(layout.mesh)
            payload = elements * engine.summed_width(context, layout)
            rows.append(tp.update_sum(group, payload, wire, layout.gradient_sync.updates))
    return rows


def _sums(layout: Layout, blocks: BlockCosts) -> Iterator[tuple[str, TensorCopies]]:
    """(group, the weights whose gradients it sums)."""
    if layout.parallel.sequence and layout.mesh.tp > 1:
        yield "tp", "replicated"
    if blocks.layer.shared:
        yield "copies", "shared"
