"""ssh to many hosts at once, none of which outlives the wait for it: its time, or the signal that tells this process to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TypeVar

from ..commands.deepspeed import SSH

TURN = 0.1  # seconds between two looks at what this process was told

Answer = TypeVar("Answer")
Told = Sequence[tuple[int, float]]  # signals that came, and when: it grows while signals() of launch.py notes them


class Stopped(Exception):
    """This process was told to stop while it waited for hosts; `number` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Ssh:
    """One ssh that runs words on a host; raises OSError where it can't be started."""

    def __init__(self, name: str, words: str) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(["ssh", *SSH, "--", name, words], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)

    def kill(self) -> None:
        """End it, with what it started, such as a ProxyCommand: who reads of it comes to its end."""
        if self.process.poll() is None:
            with suppress(OSError):  # it has gone
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Nothing of it is left when this returns."""
        self.kill()
        self.process.wait()
        for end in (self.process.stdin, self.process.stdout, self.process.stderr):
            with suppress(OSError):
                end.close()  # type: ignore[union-attr]


def at_once(
    acts: Sequence[tuple[Ssh, Callable[[], Answer]]], seconds: float, stop: Callable[[], bool] = lambda: False
) -> list[Answer | None]:
    """What each of these returns, a thread each; None of those whose ssh had to be killed: after `seconds`, or when `stop` says so."""
    if not acts:
        return []
    until = time.monotonic() + seconds
    with ThreadPoolExecutor(max_workers=len(acts)) as pool:
        waits = [pool.submit(act) for _, act in acts]
        try:
            while wait(waits, TURN).not_done and not stop() and time.monotonic() < until:
                pass
        finally:
            killed = [not each.done() for each in waits]
            for (ssh, _), late in zip(acts, killed, strict=True):
                if late:
                    ssh.kill()
    return [None if late else each.result() for each, late in zip(waits, killed, strict=True)]
