"""Exit statuses of commands, and the line on stderr for each error that ends one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from ...trainer.spec.problem import Unreadable, unexpected_error_text
from ..config.interrupts import raise_if_interrupted
from ..pages.background_printing import is_printing_blocked
from ..pages.printing import open_missing_streams, print_problems, report_os_error

OK, FAILED, WRONG_ARGUMENTS = 0, 1, 2  # it fits, or trained; it does not fit, can't run, or failed; the command line is wrong

# typer raises click's UsageError for a wrong option, from click itself or from a copy inside typer, as its version has it.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def exit_with(command: Callable[[Sequence[str]], int]) -> None:
    """Run a command with this process's arguments and exit with its status; an unforeseen error is one line on stderr too."""
    open_missing_streams()
    try:
        status = command(sys.argv[1:])
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except Exception as error:
        status = _status_of_unexpected(error)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt
    if is_printing_blocked():
        os._exit(status)
    raise SystemExit(status)


def _status_of_unexpected(error: Exception) -> int:
    """Print an error that nothing foresaw, unless it comes from a Ctrl-C; return the exit status."""
    try:
        raise_if_interrupted(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print_problems([unexpected_error_text(error)])
    return FAILED


def status_of(run: Callable[[], Any], argv: Sequence[str] = ()) -> int:
    """Call `run` and return its exit status; print the problems of its command line `argv`, and errors of files and streams."""
    try:
        return int(run() or OK)
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    except OSError as error:
        return report_os_error(error)
    except Unreadable as wrong:
        from ..keys.answer_summary import with_summary

        print_problems(with_summary(wrong.problems))
    except UsageError as wrong:
        from ..arguments.arguments import option_problems
        from ..keys.answer_summary import with_summary

        print_problems(with_summary(option_problems(wrong, argv)))
    return WRONG_ARGUMENTS
