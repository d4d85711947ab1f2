"""What a run prints, which can't end it: where a stream takes no more, what is written there goes nowhere from then on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TextIO

from ...trainer.spec.problem import shortened
from .format import one_line


def show(words: str) -> None:
    """A line of a run on stdout, in the place of the live one."""
    live("")
    wrong = _write(sys.stdout, f"{words}\n")
    if wrong is not None and not isinstance(wrong, BrokenPipeError):
        tell(f"distrain: can't write to stdout: {wrong.strerror}; what it would say is dropped")


def say(words: str) -> int:
    """Print an answer to stdout; 0. A reader that has gone is no error; raises SystemExit with status 1 where stdout is full."""
    wrong = _write(sys.stdout, f"{words}\n")
    if wrong is not None and not isinstance(wrong, BrokenPipeError):
        tell(f"distrain: can't write to stdout: {wrong.strerror}")
        raise SystemExit(1)
    return 0


def live(words: str) -> None:
    """The live line on stderr, over itself: on a terminal only."""
    if sys.stderr is not None and sys.stderr.isatty():
        _write(sys.stderr, f"\r\x1b[K{words}")


def tell(words: str) -> None:
    """A line on stderr."""
    _write(sys.stderr, f"{words}\n")


def tell_problems(problems: Iterable[object]) -> None:
    """A line of ours on stderr for each problem."""
    for problem in dict.fromkeys(map(str, problems)):
        tell(f"distrain: {shortened(one_line(problem))}")


def lost(error: OSError) -> int:
    """Say an error of a file or a stream that ends a command; its exit status. A reader that has gone is no error."""
    if isinstance(error, BrokenPipeError):
        give_up(sys.stdout)
        return 0
    where = error.filename if error.filename is not None else "can't write to stdout"
    if error.filename is None:
        give_up(sys.stdout)
    tell_problems([f"{where}: {error.strerror or error}"])
    return 1


def fill_streams() -> None:
    """Open /dev/null where this process was started without stdin, stdout or stderr: else its next file or pipe would stand there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)  # as children expect
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)


def _write(stream: TextIO | None, text: str) -> OSError | None:
    """Write and flush; why the stream has been given up."""
    try:
        if stream is not None:
            stream.write(text)
            stream.flush()
    except BlockingIOError:
        return None  # it may take the next one
    except OSError as error:
        give_up(stream)
        return error
    return None


def give_up(stream: TextIO | None) -> None:
    """What a stream still holds, and all that is written to it from now on, goes nowhere; at the interpreter's end too."""
    if stream is not None:
        with suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
