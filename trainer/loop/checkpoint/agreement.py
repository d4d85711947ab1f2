"""How the ranks of a run do a piece of a save together: each hears how it went on all the others, so that none waits in vain."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

Gather = Callable[[str], Sequence[str]]  # every rank hands in a line and gets every rank's, in rank order

_PLAIN = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would be larger than this process may write (ulimit -f)",
    errno.EROFS: "the disk can only be read",
    errno.EACCES: "writing there is not allowed",
}


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class SaveFailed(Exception):
    """A checkpoint was not saved, for the reason that its one sentence says; what was saved before still stands.

    `room`: for want of room on the disk alone.
    """

    def __init__(self, says: str, *, room: bool = False) -> None:
        super().__init__(says)
        self.room = room


def alone(line: str) -> Sequence[str]:
    """The gather of a run of one rank."""
    return [line]


def over(group: dist.ProcessGroup | None = None) -> Gather:
    """The gather of the ranks of a process group (None: all)."""

    def gather(line: str) -> Sequence[str]:
        lines = [""] * dist.get_world_size(group)
        dist.all_gather_object(lines, line, group=group)
        return lines

    return gather


def together(gather: Gather, work: Callable[[], Any]) -> list[Any]:
    """What `work` returned (JSON) on every rank; raises SaveFailed on all of them where it raised on any."""
    said, error = None, None
    try:
        said = work()
    except Exception as caught:
        error = caught
    room = isinstance(error, OSError) and error.errno in _NO_ROOM
    lines = [json.loads(line) for line in gather(json.dumps({"fault": words(error), "room": room, "said": said}))]
    faults = [(rank, line) for rank, line in enumerate(lines) if line["fault"]]
    for rank, line in faults:
        says = line["fault"] if len(lines) == 1 else f"{line['fault']} (rank {rank})"
        raise SaveFailed(says, room=all(each["room"] for _, each in faults)) from error
    return [line["said"] for line in lines]


def words(error: Exception | None) -> str:
    """What went wrong, as the rest of a sentence; "" for None."""
    match error:
        case None:
            return ""
        case OSError(errno=int(number)):
            plain = _PLAIN.get(number) or (error.strerror or "").lower() or repr(error)
            return f"{plain}: {error.filename}" if error.filename else plain
        case SaveFailed() | ValueError():
            return str(error) or repr(error)
        case _:
            return f"{type(error).__name__}: {error}".splitlines()[0]
