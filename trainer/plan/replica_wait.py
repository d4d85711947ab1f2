"""Seconds that replicas wait for the one whose documents are the longest."""

from __future__ import annotations

from collections.abc import Sequence

from ..models.ops.shared_ops import windowed_share
from .axes.dp import DataMessages
from .costs.attention_core import kernel_documents, wasted_keys
from .costs.block_costs import BlockCosts
from .costs.cost_context import CostContext
from .costs.roofline import DeviceRates
from .costs.uneven_documents import SeenKeys, slowest_replica
from .layout.layout import Layout


def replica_wait_seconds(context: CostContext, layout: Layout, blocks: BlockCosts, messages: Sequence[DataMessages]) -> float:
    """Seconds a step that the mean replica waits for the slowest at the messages of the data axis, by which gradients are summed: once a
    step, an update or a micro-batch. Ranks of experts wait for each other at every micro-batch. All stages are taken to have the same
    share of the layers' attention."""
    device = context.own_rates if layout.form != "megatron" else context.rates
    if device is None or layout.mesh.dp == 1 or kernel_documents(context.run) is None:
        return 0.0
    often = max([each.rounds for each in messages], default=1)
    longer = _excess(context, layout, often, layout.mesh.dp, device)
    if layout.mesh.ep > 1:
        longer = max(longer, _excess(context, layout, layout.micros, layout.mesh.ep, device))
    attention = context.layers * blocks.layer.core + blocks.first.core + blocks.head.core
    return longer * layout.micros * attention / layout.mesh.pp


def _excess(context: CostContext, layout: Layout, often: int, ranks: int, device: DeviceRates) -> float:
    """How much longer attention takes on the slowest of so many ranks, which wait for each other `often` times a step, as a share."""
    run, lengths = context.run, kernel_documents(context.run)
    assert lengths
    sequences = max(1, layout.micros // often) * layout.microbatch
    seen = SeenKeys(wasted_keys(device), run.model.window or 0, windowed_share(run.model, run.train.seq))
    return slowest_replica(lengths, run.train.seq, sequences, ranks, seen) - 1
