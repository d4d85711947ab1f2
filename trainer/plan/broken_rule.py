"""A rule that a run breaks, as the rules find it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..spec.run import Parallel, Run
from .changed_run import Change


@dataclass(frozen=True, slots=True)
class Broken:
    """A rule that a run breaks: what is wrong, changes that may mend it (in order), or words where no change is to be found."""

    rule: str
    says: str
    tries: tuple[Change, ...] = ()
    mend: str = ""


Rule = Callable[[Run, Parallel, int], Iterator[Broken]]
