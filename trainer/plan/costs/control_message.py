"""Small messages by which ranks agree on a step: norms, losses, flags, counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ControlMessage:
    """Equal control messages that a rank sends in a step: the verb, bytes of one, how many, and what they are, in words."""

    verb: str
    payload: int
    count: int
    says: str
