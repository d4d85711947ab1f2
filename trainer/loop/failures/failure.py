"""Reports of a failing rank: the traceback to its log, one line to the controller."""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress

from ...launch.rank.channel import Channel, Fault
from ...spec.problem import Unreadable


class AllRanksFailed(Exception):
    """All ranks have failed together, for the reason given in one line, which `rank` reports; `fault` as RankOutcome.fault."""

    fault: Fault = ""

    def __init__(self, says: str, rank: int = 0) -> None:
        super().__init__(says)
        self.rank = rank


def report_failure(error: BaseException, channel: Channel, rank: int = 0, *, says: str = "") -> None:
    """Report why this rank is about to end, in its own words or as `says`; only unexpected errors have a traceback."""
    with suppress(OSError):  # the log's disk may be full
        if isinstance(error, AllRanksFailed | Unreadable):
            print(error, file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
    if not isinstance(error, AllRanksFailed) or error.rank == rank:
        refused = isinstance(error, Unreadable) or isinstance(error.__cause__, Unreadable)
        channel.report_problem(says or first_line(error), refused=refused, fault=error.fault if isinstance(error, AllRanksFailed) else "")


def first_line(error: BaseException) -> str:
    """Return the error in one line: our own sentence, or `ValueError: no such token`."""
    if isinstance(error, AllRanksFailed | Unreadable):
        return str(error).partition("\n")[0]
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return next((each for each in lines if each.strip() and not each.startswith(" ")), repr(error))
