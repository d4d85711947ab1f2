"""How far a request came: which lines of the files to mutate run, in its process and all that are forked from it, and its log."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from .mutated_files import TRAINING, FileList, files_to_mutate

TEST = "test:"  # begins a line of the file of lines: the test that runs the lines after it
TRAINED, RUNNING = "trained:", "running:"  # begin lines of a request's log that say how far it came
NOT_RUN = "pytest ended with"  # begins what is said of tests that pytest could not run
TOO_LONG = "it takes too long"  # how a request ended that was killed at its limit
RECORD_FD = 250  # of the file of lines, in every process

Line = tuple[str, int]  # (path from the checkout's root, number)
Lines = set[Line]


class LineRecorder:
    """Appends each line of the files to mutate to a file when this process, or one forked from it, first runs it."""

    def __init__(self, root: Path, file: Path, files: FileList = TRAINING) -> None:
        names = {str(path): path.relative_to(root).as_posix() for path in files_to_mutate(root, files)}
        seen: set[tuple[Any, int]] = set()
        calls: Counter[Any] = Counter()  # of a function
        self._tests = mmap.mmap(-1, 4)  # the number of tests so far, which forked processes see
        known = bytes(4)
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
            nonlocal known
            if frame.f_code.co_filename not in names:
                return None
            if self._tests[:] != known:
                seen.clear()
                calls.clear()
                known = self._tests[:]
            calls[frame.f_code] += 1
            return on_line(frame, event, _) if calls[frame.f_code] <= files.recorded_calls else None

        threading.settrace(on_call)
        sys.settrace(on_call)

    def begin_test(self, name: str) -> None:
        """From now on every line is recorded again, for this test."""
        os.write(RECORD_FD, f"{TEST} {name}\n".encode())
        self._tests[:] = (int.from_bytes(self._tests[:], "little") + 1).to_bytes(4, "little")


def read_test_lines(file: Path) -> dict[str, dict[str, list[int]]]:
    """The lines that each test ran, by path."""
    found: dict[str, dict[str, set[int]]] = {}
    test: dict[str, set[int]] = {}
    for row in file.read_text().splitlines():
        if row.startswith(TEST):
            test = found.setdefault(row.removeprefix(TEST).strip(), {})
        else:
            path, _, number = row.rpartition(" ")
            test.setdefault(path, set()).add(int(number))
    return {name: {path: sorted(numbers) for path, numbers in lines.items()} for name, lines in found.items()}


def read_lines(file: Path, start: int = 0) -> tuple[Lines, int]:
    """(the lines recorded from byte `start` on, the file's size)."""
    data = file.read_bytes() if file.exists() else b""
    rows = (row.split() for row in data[start:].decode().splitlines())
    return {(path, int(number)) for path, number in rows}, len(data)


def is_reached(path: str, lines: tuple[int, int], reached: Iterable[Line]) -> bool:
    """Whether any line of a statement is among those that ran."""
    return any((path, number) in reached for number in range(lines[0], lines[1] + 1))
