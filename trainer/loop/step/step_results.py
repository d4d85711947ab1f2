"""The results of steps as they come: of a pipeline without a flush, some steps late."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from ...engines.engine import StepResult


class FinishedStep(NamedTuple):
    """A step whose result is there: its number from 1, its learning rate, its result."""

    done: int
    lr: float
    result: StepResult


class StepResults:
    """Matches results with the steps that they are of."""

    def __init__(self) -> None:
        self._begun: deque[tuple[int, float]] = deque()  # steps whose results have not come, oldest first

    def begin(self, done: int, lr: float) -> None:
        """Begin step `done` (from 1)."""
        self._begun.append((done, lr))

    def finish(self, results: Iterable[StepResult | None]) -> list[FinishedStep]:
        """Return the oldest steps with the results that have come."""
        return [FinishedStep(*self._begun.popleft(), result) for result in results if result is not None]
