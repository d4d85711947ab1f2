"""How a command line ends: every error as a line on stderr, and an exit status."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from ..trainer.spec.problem import Unreadable, fault
from .pages.console import fill_streams, lost, tell_problems

FINE, CANNOT, WRONG_WORDS = 0, 1, 2  # exit status: it fits; it can't run; the words are wrong

# Both bases are what every typer since 0.24 raises for a wrong option: click's UsageError, under whichever name it is packed.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def exit_with(command: Callable[[Sequence[str]], int]) -> None:
    """Run a command on the words of this process and exit with its status; an error that nobody foresaw is a line too."""
    fill_streams()
    try:
        status = command(sys.argv[1:])
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except Exception as error:
        tell_problems([fault(error)])
        status = CANNOT
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to be stopped
    raise SystemExit(status)


def status_of(run: Callable[[], Any], argv: Sequence[str] = ()) -> int:
    """The exit status of a command line that `run` does; what is wrong with its words, `argv`, is told."""
    try:
        return int(run() or FINE)
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else CANNOT
    except OSError as error:
        return lost(error)
    except Unreadable as wrong:
        tell_problems(wrong.problems)
    except UsageError as wrong:
        from .config.arguments import usage

        tell_problems([usage(wrong, argv)])
    return WRONG_WORDS
