"""How long a test waits before it fails: a test never claims that something is fast, only that it ends."""

import time
from collections.abc import Callable

DEADLINE = 300.0  # seconds, for what takes seconds on an idle machine
LONG_DEADLINE = 1200.0  # seconds, for what takes a minute of CPU time there: one process that compiles or traces many cases


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds; fail at the deadline."""
    until = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < until, "the deadline passed"
        time.sleep(0.02)
