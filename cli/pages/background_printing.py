"""Printing from a thread: a terminal or a pipe that takes no output never holds up the process that prints."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .printing import print_line, print_live_line

MOST_WAITING = 10_000  # lines; of more the oldest are left out

Show = Callable[[str], None]


@contextmanager
def print_in_background() -> Iterator[tuple[Show, Show]]:
    """Yield what prints a line, and what prints the live line, in a thread. The end of the block waits until all is printed."""
    printer = _Printer()
    try:
        yield printer.show, printer.live
    finally:
        printer.finish()


class _Printer:
    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._live: str | None = None
        self._left_out, self._is_over = 0, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="printing", daemon=True)
        self._thread.start()

    def show(self, text: str) -> None:
        """Have a line printed, in the place of the live line."""
        with self._changed:
            if len(self._lines) >= MOST_WAITING:
                self._lines.popleft()
                self._left_out += 1
            self._lines.append(text)
            self._live = None
            self._changed.notify()

    def live(self, text: str) -> None:
        """Have the live line printed; of several that wait the last is."""
        with self._changed:
            self._live = text
            self._changed.notify()

    def finish(self) -> None:
        """Wait until all is printed."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._live is not None or self._is_over)
                if not self._lines and self._live is None:
                    return
                left_out, self._left_out = self._left_out, 0
                line = self._lines.popleft() if self._lines else None
                live = None
                if line is None:
                    live, self._live = self._live, None
            if left_out:
                print_line(f"{left_out:,} lines were left out: nothing took them")
            if line is not None:
                print_line(line)
            elif live is not None:
                print_live_line(live)
