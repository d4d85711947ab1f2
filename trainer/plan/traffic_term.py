"""A reason for which an engine sends other messages than planned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrafficTerm:
    """Bytes that a rank sends on the data axis in a step with one verb for one reason, and the reason in words."""

    verb: str
    bytes: int
    says: str
