"""A log sink of a third party in a thread of its own: one that does not answer holds up no step, and a start and an end for minutes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Full, Queue
from typing import Any, Protocol

OPEN_SECONDS = 120.0  # for it to open; after that training begins, and its rows wait
CLOSE_SECONDS = 120.0  # for it to write the rows that wait and to end
MOST_WAITING = 100_000  # rows; later ones are dropped
THREAD = "log sink"  # begins the names of the threads


class ClosableSink(Protocol):
    """What the thread drives."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Write a row."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write what is left, and the summary."""


class SinkThread:
    """A sink that a thread makes, writes to and closes. What that raises is raised by the next call here."""

    def __init__(
        self,
        name: str,
        make: Callable[[], ClosableSink],
        seconds: tuple[float, float] = (OPEN_SECONDS, CLOSE_SECONDS),
        on_wait: Callable[[], object] = lambda: None,
    ) -> None:
        """`seconds`: to open and to close; `on_wait` is called while it opens."""
        open_seconds, self._close_seconds = seconds
        self._make = make
        self._rows: Queue[Mapping[str, Any] | None] = Queue(MOST_WAITING)  # None: the end
        self._dropped = 0
        self._summary: Mapping[str, Any] = {}
        self._is_open, self._error = threading.Event(), list[Exception]()
        self._thread = threading.Thread(target=self._run, name=f"{THREAD} {name}", daemon=True)
        self._thread.start()
        _wait_for(self._is_open.wait, open_seconds, on_wait)
        self._raise_error()

    def write(self, row: Mapping[str, Any]) -> None:
        """Have a row written; it is dropped where MOST_WAITING wait."""
        self._raise_error()
        try:
            self._rows.put_nowait(row)
        except Full:
            self._dropped += 1

    def close(self, summary: Mapping[str, Any], on_wait: Callable[[], object] = lambda: None) -> None:
        """Have it closed once all rows are written, and call `on_wait` meanwhile; raises TimeoutError where that takes too long, or rows
        were dropped."""
        self._summary = summary
        until = time.monotonic() + self._close_seconds
        _wait_for(self._end_rows, self._close_seconds, on_wait)
        _wait_for(self._has_ended, until - time.monotonic(), on_wait)
        self._raise_error()
        if self._thread.is_alive():
            raise TimeoutError(f"it did not end within {self._close_seconds:.0f} s, and its last rows may be lost")
        if self._dropped:
            raise TimeoutError(f"it was slow, and {self._dropped:,} rows were dropped")

    def _end_rows(self, seconds: float) -> bool:
        with suppress(Full):
            self._rows.put(None, timeout=seconds)
            return True
        return False

    def _has_ended(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _raise_error(self) -> None:
        if self._error:
            raise self._error[0]

    def _run(self) -> None:
        try:
            sink = self._make()
            self._is_open.set()
            while (row := self._rows.get()) is not None:
                sink.write(row)
            sink.close(self._summary)
        except Exception as error:
            self._error.append(error)
        finally:
            self._is_open.set()


def _wait_for(wait: Callable[[float], bool], seconds: float, on_wait: Callable[[], object]) -> None:
    """Wait by `wait`, which takes seconds and returns whether that is over, for at most so many; call `on_wait` each second."""
    until = time.monotonic() + seconds
    while not wait(max(0.0, min(1.0, until - time.monotonic()))):
        on_wait()
        if time.monotonic() >= until:
            return


def is_any_stuck() -> bool:
    """Whether a sink of this process has not ended: its package may wait for it at Python's exit."""
    return any(thread.name.startswith(THREAD) for thread in threading.enumerate())
