"""The few units that a sentence about a plan needs."""

from __future__ import annotations


def gib(size: float) -> str:
    """Bytes as GiB, one digit after the point; small ones with more, so that nothing reads as 0.0."""
    amount = size / 2**30
    return f"{amount:,.1f}" if amount >= 1 or amount == 0 else f"{amount:.3g}"


def percent(share: float) -> str:
    """A share as a whole percentage."""
    return f"{100 * share:.0f} %"
