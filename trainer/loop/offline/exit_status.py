"""How a child that does the torch half of a verb ends: what is wrong, a line each on stderr, and an exit status."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from ...spec.problem import Unreadable, fault, shortened
from ..checkpoint import LoadFailed

FINE, CANNOT = 0, 1


class StdoutFull(Exception):
    """Stdout takes no more, for the reason that the words say."""


def say(text: str) -> None:
    """Write to stdout at once; raises BrokenPipeError where its reader has gone, and StdoutFull."""
    try:
        if sys.stdout is not None:
            sys.stdout.write(text)
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _give_up_stdout()
        raise StdoutFull(f"can't write to stdout: {error.strerror}") from None


def _give_up_stdout() -> None:
    """What stdout still holds goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def answered(work: Callable[[], None]) -> int:
    """Do the work; the exit status of this process."""
    try:
        work()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Unreadable as wrong:
        return _told(map(str, wrong.problems))
    except BrokenPipeError:
        _give_up_stdout()  # whoever read has gone: no error
    except OSError as error:
        return _told([f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)])
    except (LoadFailed, StdoutFull) as error:
        return _told([str(error)])
    except (MemoryError, RuntimeError) as error:
        full = isinstance(error, MemoryError) or "memory" in str(error)
        return _told(["this machine has not enough memory for it" if full else fault(error)])
    except Exception as error:
        return _told([fault(error)])
    return FINE


def _told(problems: map[str] | list[str]) -> int:
    for problem in problems:
        tell(problem)
    return CANNOT


def tell(problem: str) -> None:
    """Write a line of ours to stderr."""
    with suppress(OSError, AttributeError):  # stderr takes nothing, or there is none
        print(f"distrain: {shortened(' '.join(problem.split()))}", file=sys.stderr, flush=True)
