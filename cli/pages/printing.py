"""Printing to stdout and stderr; a stream that can't be written to never ends a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from ...trainer.spec.problem import one_line, shorten


def print_line(text: str) -> None:
    """Print a line of a run to stdout, in the place of the live line; where stdout is full, say so once and go on without it."""
    print_live_line("")
    failure = _write(sys.stdout, f"{text}\n")
    if failure is not None and not isinstance(failure, BrokenPipeError):
        print_error(f"distrain: can't write to stdout: {failure.strerror}; the run goes on without this output")


def print_output(text: str) -> int:
    """Print a verb's output to stdout and return 0, also where its reader has gone; raises SystemExit(1) where stdout is full."""
    failure = _write(sys.stdout, f"{text}\n")
    if failure is not None and not isinstance(failure, BrokenPipeError):
        print_error(f"distrain: can't write to stdout: {failure.strerror}")
        raise SystemExit(1)
    return 0


def print_json(document: object) -> int:
    """Print a document as JSON to stdout, and nothing else; return as `print_output` does."""
    from msgspec import json

    return print_output(json.format(json.encode(document)).decode())


def print_unwritten(file: str, error: OSError) -> int:
    """Print why a file of the command line can't be written; return the exit status 1."""
    print_error(one_line(f"distrain: {file} can't be written ({(error.strerror or str(error)).lower()}): choose another file"))
    return 1


def print_live_line(text: str) -> None:
    """Print the live line to stderr over the one before, where stderr is a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        _write(sys.stderr, f"\r\x1b[K{text}")


@contextmanager
def live_line(text: str) -> Iterator[None]:
    """Show the live line while the block runs, and remove what is there after it."""
    print_live_line(text)
    try:
        yield
    finally:
        print_live_line("")


def print_error(text: str) -> None:
    """Print a line to stderr."""
    _write(sys.stderr, f"{text}\n")


def print_problems(problems: Iterable[object]) -> None:
    """Print each different problem to stderr, on one line that begins with `distrain: `."""
    for problem in dict.fromkeys(map(str, problems)):
        print_error(f"distrain: {shorten(one_line(problem))}")


def report_os_error(error: OSError) -> int:
    """Print the error of a file or a stream that ends a command and return its exit status: 0 where stdout's reader has gone."""
    if isinstance(error, BrokenPipeError):
        discard_output(sys.stdout)
        return 0
    where = error.filename if error.filename is not None else "can't write to stdout"
    if error.filename is None:
        discard_output(sys.stdout)
    print_problems([f"{where}: {error.strerror or error}"])
    return 1


def open_missing_streams() -> None:
    """Open /dev/null for stdin, stdout or stderr where this process was started without; its next file would get their number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)  # children expect all three
            if null != number:
                os.dup2(null, number)
                os.close(null)


def discard_output(stream: TextIO | None) -> None:
    """Send what a stream still buffers, and all that is written to it later, to /dev/null: the interpreter flushes it at its end."""
    if stream is not None:
        with suppress(OSError), open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), stream.fileno())


def _write(stream: TextIO | None, text: str) -> OSError | None:
    """Write and flush; return the error after which the stream's output is discarded."""
    try:
        if stream is not None:
            stream.write(text)
            stream.flush()
    except BlockingIOError:
        return None  # the next write may succeed
    except OSError as error:
        discard_output(stream)
        return error
    return None
