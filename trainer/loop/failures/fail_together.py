"""Work that fails on all ranks where it fails on one, so that none waits for a rank that has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...spec.problem import Unreadable
from ..checkpoint import Gather, LoadFailed
from .failure import AllRanksFailed

Result = TypeVar("Result")


def fail_together(gather: Gather, work: Callable[[], Result]) -> Result:
    """Return the result of the work on this rank.

    Raises AllRanksFailed on every rank where the work raises Unreadable or LoadFailed on any; the lowest of those ranks reports it.
    """
    problem, cause = "", None
    try:
        result = work()
    except (Unreadable, LoadFailed) as error:
        problem, cause = str(error).partition("\n")[0], error
    for rank, each in enumerate(gather(problem)):
        if each:
            raise AllRanksFailed(each, rank) from cause
    return result
