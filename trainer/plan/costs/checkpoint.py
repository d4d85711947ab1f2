"""What a rank saves of a checkpoint: float32 weights and optimizer states, each element by one rank."""

from __future__ import annotations

from ..layout.layout import Layout, StageKind
from ..layout.workers import outer_momentum_bytes
from .block_costs import BlockCosts
from .cost_context import CostContext
from .cost_model import StageElements
from .precision import average_bytes, moment_count, saved_moment_width

WEIGHT_BYTES = 4  # bytes a parameter in a checkpoint: float32


def saved_width(context: CostContext) -> int:
    """Return the bytes of a parameter in a checkpoint."""
    run = context.run
    return (
        WEIGHT_BYTES
        + saved_moment_width(run.optim) * moment_count(run.optim)
        + average_bytes(run.optim)
        + outer_momentum_bytes(run.parallel, context.world, run.cluster.gpus)
    )


def spared_width(context: CostContext) -> int:
    """Return the bytes of a parameter in a checkpoint that a hidden matrix lacks."""
    return saved_moment_width(context.run.optim) if context.spared else 0


def saved_part_bytes(context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind, elements: StageElements) -> int:
    """Return the bytes of a checkpoint that a rank of a kind of stage saves, which has these elements: an even share of what several ranks
    hold alike. Where they hold weights whole, each saves every nth weight, and some have more than others. Of a tied weight on two stages
    the first stage's copy is saved."""
    ranks, expert_ranks = layout.mesh.size("data"), layout.mesh.size("expert_copies")
    width, tied = saved_width(context), blocks.tied if kind.last and not (kind.first or blocks.head.frozen) else 0
    dense = width * (elements.trained_dense - tied) - spared_width(context) * elements.matrices + context.constants_of(kind)
    experts = width * elements.trained_experts - spared_width(context) * elements.expert_matrices
    return dense // ranks + experts // expert_ranks
