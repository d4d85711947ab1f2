"""How far a request came: which lines of the files to mutate run, in its process and all that are forked from it, and its log."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from .mutated_files import files_to_mutate

TRAINED, RUNNING = "trained:", "running:"  # begin lines of a request's log that say how far it came
TOO_LONG = "it takes too long"  # how a request ended that was killed at its limit
RECORD_FD = 250  # of the file of lines, in every process

Line = tuple[str, int]  # (path from the checkout's root, number)
Lines = set[Line]


def record_lines(root: Path, file: Path) -> None:
    """Append each line of the files to mutate to `file` when this process, or one forked from it, first runs it."""
    names = {str(path): path.relative_to(root).as_posix() for path in files_to_mutate(root)}
    seen: set[tuple[Any, int]] = set()
    out = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(out, RECORD_FD, inheritable=False)
    os.close(out)

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        key = (frame.f_code, frame.f_lineno)
        if key not in seen:
            seen.add(key)
            os.write(RECORD_FD, f"{names[frame.f_code.co_filename]} {frame.f_lineno}\n".encode())
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        return on_line(frame, event, _) if frame.f_code.co_filename in names else None

    threading.settrace(on_call)
    sys.settrace(on_call)


def read_lines(file: Path, start: int = 0) -> tuple[Lines, int]:
    """(the lines recorded from byte `start` on, the file's size)."""
    data = file.read_bytes() if file.exists() else b""
    rows = (row.split() for row in data[start:].decode().splitlines())
    return {(path, int(number)) for path, number in rows}, len(data)


def is_reached(path: str, lines: tuple[int, int], reached: Iterable[Line]) -> bool:
    """Whether any line of a statement is among those that ran."""
    return any((path, number) in reached for number in range(lines[0], lines[1] + 1))
