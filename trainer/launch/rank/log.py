"""A rank's log: one file for all attempts, with a header for each, and the exception that its last lines hold."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

SEARCHED_BYTES = 1 << 16  # at the end of a log, that are read
SEARCHED_LINES = 2000  # at the end of a log, in which the exception is looked for
_PREFIX = re.compile(r"^\[rank\d+\]:\s?")  # torch's own, before each line of a traceback
_EXCEPTION = re.compile(
    r"^(?:[\w.]*(?:Error|Exception|Interrupt|Exit)(?::|$)|Fatal Python error: |\s*what\(\): |can't start |.*Assertion .* failed)"
)


class RankLog(NamedTuple):
    """A log's path, and the byte at which this attempt begins."""

    path: Path
    start: int

    def last_lines(self, most: int) -> tuple[str, ...]:
        """Return the last lines that this attempt wrote, without empty ones; none if the file is gone."""
        try:
            with self.path.open("rb") as file:
                end = file.seek(0, 2)
                file.seek(max(self.start if self.start <= end else 0, end - SEARCHED_BYTES))  # a shorter file was emptied, or replaced
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ()
        return tuple(line.rstrip() for line in lines if line.strip())[-most:]

    def from_here(self) -> RankLog:
        """Return the same log, beginning at its present end."""
        try:
            return RankLog(self.path, self.path.stat().st_size)
        except OSError:
            return self


class RemoteLog(NamedTuple):
    """The last lines of a log on another host, as they were when its rank had ended."""

    path: Path  # with the host's name before it
    lines: tuple[str, ...] = ()

    def last_lines(self, most: int) -> tuple[str, ...]:
        """Return the last of them."""
        return self.lines[-most:]


def open_rank_log(folder: Path, rank: int, ranks: int) -> tuple[RankLog, IO[bytes]]:
    """Open `folder`/RANK.log for appending, and write the header of this attempt."""
    return open_log_file(folder / f"{rank}.log", f"rank {rank} of {ranks}")


def open_log_file(path: Path, who: str) -> tuple[RankLog, IO[bytes]]:
    """Open a log for appending, and write the header that `who` starts."""
    file = path.open("ab", buffering=0)
    before = "\n" if has_partial_line(path) else ""
    file.write(f"{before}== {who} starts, {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n".encode())
    return RankLog(path, path.stat().st_size), file


def has_partial_line(path: Path) -> bool:
    """Whether the last line of a file lacks its end, as a killed process leaves it."""
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return False
        file.seek(-1, 2)
        return file.read() != b"\n"


def exception_line(lines: Sequence[str]) -> str:
    """Return the exception that ended a process, from the last lines of its log; "" if there is none."""
    plain = [_PREFIX.sub("", line) for line in lines]
    found = -1
    for at, line in enumerate(plain):
        if line.startswith("Traceback (most recent call last)"):
            found = next((later for later in range(at + 1, len(plain)) if not plain[later].startswith((" ", "\t"))), found)
        elif _EXCEPTION.match(line):
            found = at
    return plain[found].strip() if found >= 0 else ""
