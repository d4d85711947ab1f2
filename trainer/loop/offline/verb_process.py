"""How a child process that runs the torch half of a verb ends: it prints problems on stderr, a line each, and exits with a status."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from ...spec.problem import Unreadable, shorten, unexpected_error_text
from ..checkpoint import LoadFailed

SUCCESS, FAILURE = 0, 1


class StdoutFull(Exception):
    """Stdout can't be written, for the reason given."""


def write_stdout(text: str) -> None:
    """Write to stdout and flush; raises BrokenPipeError where its reader has closed it, and StdoutFull."""
    try:
        if sys.stdout is not None:
            sys.stdout.write(text)
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard_stdout()
        raise StdoutFull(f"can't write to stdout: {error.strerror}") from None


def _discard_stdout() -> None:
    """Send what stdout still buffers to /dev/null."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_verb(work: Callable[[], None]) -> int:
    """Do the work, report its problems on stderr, and return the exit status of this process."""
    try:
        work()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Unreadable as wrong:
        return _report_problems(map(str, wrong.problems))
    except BrokenPipeError:
        _discard_stdout()  # the reader has closed stdout, which is no error
    except OSError as error:
        return _report_problems([f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)])
    except (LoadFailed, StdoutFull) as error:
        return _report_problems([str(error)])
    except (MemoryError, RuntimeError) as error:
        full = isinstance(error, MemoryError) or "memory" in str(error)
        return _report_problems(["this machine does not have enough memory for it" if full else unexpected_error_text(error)])
    except Exception as error:
        return _report_problems([unexpected_error_text(error)])
    return SUCCESS


def _report_problems(problems: map[str] | list[str]) -> int:
    for problem in problems:
        write_problem(problem)
    return FAILURE


def write_problem(problem: str) -> None:
    """Write a problem to stderr, in one line."""
    with suppress(OSError, AttributeError):  # stderr can't be written, or there is none
        print(f"distrain: {shorten(' '.join(problem.split()))}", file=sys.stderr, flush=True)
