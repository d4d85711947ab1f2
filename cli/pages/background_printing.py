"""Printing from a thread: a terminal or a pipe that takes no output never holds up the process that prints."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .printing import print_line, print_live_line

MOST_WAITING = 10_000  # lines; of more the oldest are left out
STOP_PATIENCE = 5.0  # seconds that a command which was asked to stop waits for its output to be taken
THREAD = "printing"


@contextmanager
def print_in_background() -> Iterator[BackgroundPrinter]:
    """Yield what prints in a thread. The end of the block waits until all is printed, for at most the printer's patience; Ctrl-C ends that
    wait."""
    printer = BackgroundPrinter()
    try:
        yield printer
    finally:
        printer.finish()


def is_printing_blocked() -> bool:
    """Whether output still waits to be taken: Python's exit would wait for it, or abort."""
    return any(thread.name == THREAD for thread in threading.enumerate())


class BackgroundPrinter:
    """Prints in a thread. `patience`: the seconds that the end waits until all is printed; None: as long as that takes."""

    def __init__(self) -> None:
        self.patience: float | None = None
        self._lines: deque[str] = deque()
        self._live: str | None = None
        self._left_out, self._is_over = 0, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
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
        """Wait until all is printed, or patience or the user ends the wait."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        with suppress(KeyboardInterrupt):
            self._thread.join(self.patience)

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
