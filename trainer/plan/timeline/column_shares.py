"""What a stage does in each of equally long columns of a step, for pictures with fewer columns than spans."""

from __future__ import annotations

from collections import Counter

from .timeline import StageTimeline

IDLE = "idle"


def column_shares(stage: StageTimeline, seconds: float, columns: int) -> list[Counter[str]]:
    """Return, for each of so many columns of a step, the share of its time that goes to each kind of span, and to none (IDLE)."""
    shares: list[Counter[str]] = [Counter() for _ in range(columns)]
    per_second = columns / seconds if seconds else 0.0
    for span in stage.spans:
        start, end = span.start * per_second, span.end * per_second
        for column in range(min(int(start), columns - 1), min(int(end), columns - 1) + 1):
            inside = min(end, column + 1) - max(start, column)
            if inside > 0:
                shares[column][span.kind] += inside  # type: ignore[assignment]
    for each in shares:
        each[IDLE] = max(0.0, 1.0 - sum(each.values()))  # type: ignore[assignment]
    return shares
