"""Time limits on code of the test process: an exception is raised in it after seconds of its processor's time, or of the clock."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}


class TooLong(Exception):
    """The code took more processor time than allowed."""


@contextmanager
def raise_after(seconds: float, error: type[Exception], timer: int = signal.ITIMER_REAL, *, again: float = 0) -> Iterator[None]:
    """Raise an error in the block after so many seconds, and every `again` seconds after that."""

    def expire(*_: object) -> None:
        raise error

    before = signal.signal(SIGNALS[timer], expire)
    signal.setitimer(timer, seconds, again)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(SIGNALS[timer], before)


@contextmanager
def limit_processor_time(seconds: float) -> Iterator[None]:
    """Raise TooLong when the process has used so much processor time, which other processes on this machine do not affect."""
    with raise_after(seconds, TooLong, signal.ITIMER_PROF, again=seconds):
        yield
