"""Pipeline schedules, run: every action once, in an order that no stage waits for in vain, in the time that the planner counts."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distrain.trainer.plan.schedules import SCHEDULES, Action, Schedule, bubble_share, held_at_once

EVERY = pytest.mark.parametrize("name", SCHEDULES)
FLUSHING = [name for name, row in SCHEDULES.items() if row.flushes]

Pipeline = tuple[int, int, int]  # stages, micro-batches, chunks


def pipelines(name: str) -> st.SearchStrategy[Pipeline]:
    """Pipelines that a schedule runs: one with chunks takes micro-batches in rounds of its stages."""
    if SCHEDULES[name].chunked:
        return st.integers(2, 6).flatmap(lambda p: st.tuples(st.just(p), st.integers(1, 4).map(lambda rounds: rounds * p), st.integers(2, 4)))
    return st.tuples(st.integers(1, 9), st.integers(1, 24), st.just(1))


def test_all() -> None: ...
