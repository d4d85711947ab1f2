"""How learning rates and initial deviations follow the width of a model, as maximal update parametrization says (`optim.mup`,
arXiv:2203.03466 table 3, column of Adam)."""

from __future__ import annotations

from math import sqrt

from ..run import Run

# Tables that a token reads one row of, whatever the width: their updates and values are those of the narrow model.
INPUT_TABLES = ("embedding.weight", "positions.weight")
# Matrices to a number of outputs that does not grow with the width.
OUTPUT_MATRICES = ("head.weight", "router.weight", "shared_gate.weight")


def width_factor(run: Run) -> float:
    """Return how many times wider the model is than the one whose learning rate it takes; 1 without optim.mup."""
    return run.model.hidden / run.optim.mup if run.optim.mup else 1.0


def is_rate_divided(run: Run, name: str, dims: int) -> bool:
    """Return whether the learning rate of a weight of some dims, by its logical name, is divided by `width_factor`: that of a matrix that
    sums over the width. Biases of experts, which have a row for each, are none."""
    return run.optim.mup is not None and dims > 1 and name not in INPUT_TABLES and not name.endswith(".bias")


def initial_divisor(run: Run, name: str) -> float:
    """Return what muP divides the initial deviation of a matrix by, by its logical name."""
    if name in INPUT_TABLES:
        return 1.0
    return width_factor(run) if name.endswith(OUTPUT_MATRICES) else sqrt(width_factor(run))
