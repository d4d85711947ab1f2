"""Problems with a run's data, and the error that reports them."""

from __future__ import annotations

from ....spec.problem import Problem, Unreadable


def data_problem(says: str, mend: str = "") -> Problem:
    """Return a problem of the rule `data`."""
    return Problem(rule="data", says=says, mend=mend)


def data_error(says: str, mend: str = "") -> Unreadable:
    """Return an Unreadable with one such problem, for the caller to raise."""
    return Unreadable([data_problem(says, mend)])
