"""A child process that ends when the process that started it does, however that is, and its own children with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from .parent_watch import VARIABLE as LIFELINE

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def start_child(words: Sequence[str], environment: Mapping[str, str] = os.environ, **streams: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run `python WORDS` in a session of its own; when the block ends, so do it and its own children.

    It holds a lifeline (trainer/system/parent_watch.py) if it asks for it. Raises OSError where it can't be started.
    """
    held, cut = os.pipe()
    came = list[int]()
    try:
        with _stops_noted(came):  # one that is raised inside Popen would leave a child that nobody knows
            child = subprocess.Popen(
                [sys.executable, *words],
                env={**environment, "PYTHONSAFEPATH": "1", LIFELINE: str(held)},
                pass_fds=(held,),
                start_new_session=True,  # its lifeline ends all of its process group
                **streams,
            )
    except BaseException:
        os.close(cut)
        raise
    finally:
        os.close(held)
    try:
        for number in came:
            signal.raise_signal(number)
        yield child
    finally:
        os.close(cut)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        child.wait()


@contextmanager
def _stops_noted(came: list[int]) -> Iterator[None]:
    """Note the signals that ask this process to stop, in the place of their handlers; those that are ignored stay so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOPS}
    for number, handler in before.items():
        if handler not in (signal.SIG_IGN, None):
            signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler not in (signal.SIG_IGN, None):
                signal.signal(number, handler)
