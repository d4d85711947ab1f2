"""A rule that a run breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...spec.changed_run import Change
from ...spec.run import Parallel, Run


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A broken rule: what is wrong, candidate changes that may fix it, in order, and a fix in words where none of them does."""

    rule: str
    says: str
    candidates: tuple[Change, ...] = ()
    fix: str = ""


Rule = Callable[[Run, Parallel, int], Iterator[BrokenRule]]
