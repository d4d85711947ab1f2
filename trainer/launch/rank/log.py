"""A rank's log: one file for all its starts, with a header for each, and what its last lines say about its end."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

TAIL = 1 << 16  # bytes that are read of a log's end
_PREFIX = re.compile(r"^\[rank\d+\]:\s?")  # torch's own, before each line of a traceback
_RAISED = re.compile(
    r"^(?:[\w.]*(?:Error|Exception|Interrupt|Exit)(?::|$)|Fatal Python error: |\s*what\(\): |can't start |.*Assertion .* failed)"
)


class Log(NamedTuple):
    """A log's path, and the byte at which this start of the rank begins."""

    path: Path
    start: int

    def last_lines(self, most: int) -> tuple[str, ...]:
        """The last lines that this start wrote, without empty ones."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(self.start, file.seek(0, 2) - TAIL))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ()  # someone took it away
        return tuple(line.rstrip() for line in lines if line.strip())[-most:]

    def from_here(self) -> Log:
        """The same log, from its present end on."""
        try:
            return Log(self.path, self.path.stat().st_size)
        except OSError:
            return self


class Tail(NamedTuple):
    """The last lines of a log on another host, as they were when its rank had ended."""

    path: Path  # with the host's name before it
    lines: tuple[str, ...] = ()

    def last_lines(self, most: int) -> tuple[str, ...]:
        """The last of them."""
        return self.lines[-most:]


def open_log(folder: Path, rank: int, ranks: int) -> tuple[Log, IO[bytes]]:
    """`folder`/N.log, open for appending, its header written."""
    return opened(folder / f"{rank}.log", f"rank {rank} of {ranks}")


def opened(path: Path, who: str) -> tuple[Log, IO[bytes]]:
    """A log, open for appending, a header written that `who` starts."""
    file = path.open("ab", buffering=0)
    before = "\n" if _ends_midway(path) else ""
    file.write(f"{before}== {who} starts, {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n".encode())
    return Log(path, path.stat().st_size), file


def _ends_midway(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return False
        file.seek(-1, 2)
        return file.read() != b"\n"


def raised(lines: Sequence[str]) -> str:
    """The exception that ended a process, from the last lines of its log; "" where none is found."""
    plain = [_PREFIX.sub("", line) for line in lines]
    found = -1
    for at, line in enumerate(plain):
        if line.startswith("Traceback (most recent call last)"):
            found = next((later for later in range(at + 1, len(plain)) if not plain[later].startswith((" ", "\t"))), found)
        elif _RAISED.match(line):
            found = at
    return plain[found].strip() if found >= 0 else ""
