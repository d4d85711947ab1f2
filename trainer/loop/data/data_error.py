"""What is wrong with the data that a user named."""

from __future__ import annotations

from ...spec.problem import Problem, Unreadable


def wrong(says: str, mend: str = "") -> Problem:
    """A problem of the rule `data`."""
    return Problem(rule="data", says=says, mend=mend)


def refused(says: str, mend: str = "") -> Unreadable:
    """That problem, to be raised."""
    return Unreadable([wrong(says, mend)])
