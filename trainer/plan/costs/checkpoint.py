"""What a rank saves of a checkpoint: float32 weights and optimizer states, each element by one rank."""

from __future__ import annotations

from ..layout.layout import Layout, StageKind
from ..layout.workers import outer_momentum_bytes
from .cost_context import CostContext
from .cost_model import StageElements
from .precision import moment_bytes

WEIGHT_BYTES = 4  # bytes a parameter in a checkpoint: float32


def saved_width(context: CostContext) -> int:
    """Return the bytes of a parameter in a checkpoint."""
    run = context.run
    return WEIGHT_BYTES + moment_bytes(run.optim) + outer_momentum_bytes(run.parallel, context.world, run.cluster.gpus)


def saved_part_bytes(context: CostContext, layout: Layout, kind: StageKind, elements: StageElements) -> int:
    """Return the bytes of a checkpoint that a rank of a kind of stage saves, which has these elements: an even share of what several ranks
    hold alike. Where they hold weights whole, each saves every nth weight, and some have more than others."""
    ranks, expert_ranks = layout.mesh.size("data"), layout.mesh.size("expert_copies")
    width = saved_width(context)
    dense = width * (elements.dense - elements.frozen) - context.spared * elements.matrices + kind.layers * context.layer_constants
    experts = width * elements.experts - context.spared * elements.expert_matrices
    return dense // ranks + experts // expert_ranks
