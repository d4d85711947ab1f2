"""How a rank that fails says so: all of it to its log, and in a line to who launched it."""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress

from ..launch.rank.channel import Talk
from ..spec.problem import Unreadable


class AllFailed(Exception):
    """All ranks have failed together, for the reason that its one line says; of them `rank` tells it."""

    def __init__(self, says: str, rank: int = 0) -> None:
        super().__init__(says)
        self.rank = rank


def told(error: BaseException, talk: Talk, rank: int = 0) -> None:
    """Say why this rank is about to end; a traceback is of what nobody foresaw."""
    with suppress(OSError):  # of a full disk that the log is on
        if isinstance(error, AllFailed | Unreadable):
            print(error, file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
    if not isinstance(error, AllFailed) or error.rank == rank:
        talk.problem(line(error), refused=isinstance(error, Unreadable) or isinstance(error.__cause__, Unreadable))


def line(error: BaseException) -> str:
    """What went wrong, as its first line says it: a sentence of ours, or `ValueError: no such token`."""
    if isinstance(error, AllFailed | Unreadable):
        return str(error).partition("\n")[0]
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return next((each for each in lines if each.strip() and not each.startswith(" ")), repr(error))
