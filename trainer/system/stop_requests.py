"""Signals that ask a process to stop: noted to act on later, or raised as an exception where they arrive.

Only the main thread can set signal handlers: in another thread the context managers here do nothing. A signal that the process
ignores (nohup) stays ignored.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DEFERRED_SIGNALS = (signal.SIGTERM, signal.SIGINT)  # as those of agent/pipe_agent.py, which blocks them while a rank loads

StopRequests = list[tuple[int, float]]  # (signal, time.monotonic() of its arrival)


class StopFlag:
    """`requested`: whether this process received SIGTERM or SIGINT since it listens, including any that its agent blocked until then."""

    def __init__(self, *, listens: bool = True) -> None:
        """Without `listens` these signals end this process until `listen` is called."""
        self.requested = False
        self._listens = False
        if listens:
            self.listen()
        else:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # not Python's KeyboardInterrupt

    def listen(self) -> None:
        """Note these signals from now on."""
        if self._listens:
            return
        self._listens = True
        for number in DEFERRED_SIGNALS:
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, DEFERRED_SIGNALS)

    def ignore_further(self) -> None:
        """Ignore later signals: at exit Python removes its handlers, and a late SIGTERM would kill a process that has finished."""
        for number in DEFERRED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, frame: object) -> None:
        self.requested = True


class StopSignal(BaseException):
    """This process was asked to stop by the signal `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def collect_stop_requests(outer: StopRequests | None = None) -> Iterator[StopRequests]:
    """Collect the stop signals that arrive while the block runs.

    `outer` is the list of an enclosing block, which keeps collecting; it is yielded as it is.
    """
    if outer is not None:
        yield outer
        return
    requests: StopRequests = []

    def note(number: int, frame: FrameType | None) -> None:
        requests.append((number, time.monotonic()))

    with _handlers(STOP_SIGNALS, note):
        yield requests


@contextmanager
def raise_on_stop_signals() -> Iterator[None]:
    """Raise StopSignal in the block when SIGTERM or SIGHUP arrives; SIGINT raises KeyboardInterrupt, as ever."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StopSignal(number)

    with _handlers((signal.SIGTERM, signal.SIGHUP), stop):
        yield


@contextmanager
def _handlers(signals: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install a handler for those of the signals that are not ignored; restore the previous ones after the block."""
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in signals:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
