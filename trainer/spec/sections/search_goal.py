"""The section `search` of a run, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..numbers.bounded import Below1, Count, Positive


@dataclass(frozen=True, kw_only=True)
class SearchGoal:
    """What `distrain search` looks for, and where."""

    by: Literal["time", "memory", "cost", "days", "tokens_per_dollar"] = "time"
    runnable: bool = True
    rows: Count = 10
    headroom: Below1 = 0.05
    boundaries: bool = False
    nodes: str | None = None
    within: Positive | None = None
