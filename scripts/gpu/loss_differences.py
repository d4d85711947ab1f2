"""How far the losses of two trainings are apart."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan


def most_apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference between two trainings' losses, step by step, in nats."""
    return largest([abs(left - right) for left, right in zip(one, other, strict=True)])


def largest(differences: Sequence[float]) -> float:
    """Return the largest; nan where one is, which is within no limit."""
    return nan if any(map(isnan, differences)) else max(differences)
