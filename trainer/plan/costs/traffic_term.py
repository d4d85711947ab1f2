"""Bytes that an engine sends on the data axis with one verb for one reason: explains counts that differ from the plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrafficTerm:
    """Bytes that a rank sends on the data axis in a step with one verb for one reason, and the reason in words; `every` as in a plan's
    messages."""

    verb: str
    bytes: int
    says: str
    every: int = 1
    most: int | None = None  # bytes; where they are known only roughly, `bytes` is the least
