"""Work that all ranks do together in a save: if it fails on one rank, it fails on all, so that none waits for ever."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

Gather = Callable[[str], Sequence[str]]  # takes this rank's line and returns the lines of all ranks, in rank order

_ERRNO_TEXT = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would be larger than this process may write (ulimit -f)",
    errno.EROFS: "the disk can only be read",
    errno.EACCES: "writing there is not allowed",
}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class SaveFailed(Exception):
    """A checkpoint was not saved, for the reason given in one sentence; earlier checkpoints are intact.

    `room`: the disk has no room, and nothing else failed.
    """

    def __init__(self, says: str, *, room: bool = False) -> None:
        super().__init__(says)
        self.room = room


def gather_alone(line: str) -> Sequence[str]:
    """Gather for a single rank."""
    return [line]


def gather_over(group: dist.ProcessGroup | None = None) -> Gather:
    """Return the gather of the ranks of a process group (None: all)."""

    def gather(line: str) -> Sequence[str]:
        lines = [""] * dist.get_world_size(group)
        dist.all_gather_object(lines, line, group=group)
        return lines

    return gather


def collect_over(group: dist.ProcessGroup | None = None) -> Gather:
    """Return a gather of the ranks of a process group (None: all) that gives all lines to its first rank, and none to the others."""

    def collect(line: str) -> Sequence[str]:
        is_first = dist.get_rank(group) == 0
        lines = [""] * dist.get_world_size(group) if is_first else None
        dist.gather_object(line, lines, group=group, group_dst=0)
        return lines or ()

    return collect


def run_on_all_ranks(gather: Gather, work: Callable[[], Any]) -> list[Any]:
    """Do the work on every rank. Return its results (JSON) in rank order; raise SaveFailed on all ranks where it raised on any."""
    result, error = None, None
    try:
        result = work()
    except Exception as caught:
        error = caught
    room = isinstance(error, OSError) and error.errno in _NO_ROOM
    lines = [json.loads(line) for line in gather(json.dumps({"fault": fault_text(error), "room": room, "result": result}))]
    faults = [(rank, line) for rank, line in enumerate(lines) if line["fault"]]
    for rank, line in faults:
        reason = line["fault"] if len(lines) == 1 else f"{line['fault']} (rank {rank})"
        raise SaveFailed(reason, room=all(each["room"] for _, each in faults)) from error
    return [line["result"] for line in lines]


def fault_text(error: Exception | None) -> str:
    """Return the reason of an error, as the end of a sentence; "" for None."""
    match error:
        case None:
            return ""
        case OSError(errno=int(number)):
            reason = _ERRNO_TEXT.get(number) or (error.strerror or "").lower() or repr(error)
            return f"{reason}: {error.filename}" if error.filename else reason
        case SaveFailed() | ValueError():
            return str(error) or repr(error)
        case _:
            return f"{type(error).__name__}: {error}".splitlines()[0]
