"""Which weights `optim.weight_decay` applies to."""

from __future__ import annotations


def is_decayed(name: str, dims: int) -> bool:
    """Return whether a weight of some dims decays, by its logical name: a matrix does, a norm or a bias does not. Biases of experts have a
    row for each expert, and are biases all the same."""
    return dims > 1 and not name.endswith("bias")
