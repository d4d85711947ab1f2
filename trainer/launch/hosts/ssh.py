"""Concurrent ssh calls to many hosts, killed at a time limit or when a stop is requested."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TypeVar

from .shell_safe import SSH_OPTIONS

POLL_SECONDS = 0.1  # between two looks at the time and the stop requests

Answer = TypeVar("Answer")


class SshInterrupted(Exception):
    """A stop was requested by the signal `number` while this process waited for hosts."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Ssh:
    """An ssh process that runs `command` on the host `name`; raises OSError where it can't be started."""

    def __init__(self, name: str, command: str) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            ["ssh", *SSH_OPTIONS, "--", name, command], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )

    def kill(self) -> None:
        """Kill it and what it started, such as a ProxyCommand; its readers get the end of file."""
        if self.process.poll() is None:
            with suppress(OSError):  # it has just ended
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it, wait for its end and close its pipes."""
        self.kill()
        self.process.wait()
        for end in (self.process.stdin, self.process.stdout, self.process.stderr):
            with suppress(OSError):
                end.close()  # type: ignore[union-attr]


def run_concurrently(
    acts: Sequence[tuple[Ssh, Callable[[], Answer]]], seconds: float, stop: Callable[[], bool] = lambda: False
) -> list[Answer | None]:
    """Run each act in a thread and return the results; None for an act whose ssh was killed, after `seconds` or once `stop` is true."""
    if not acts:
        return []
    until = time.monotonic() + seconds
    with ThreadPoolExecutor(max_workers=len(acts)) as pool:
        futures = [pool.submit(act) for _, act in acts]
        try:
            while wait(futures, POLL_SECONDS).not_done and not stop() and time.monotonic() < until:
                pass
        finally:
            running = [(ssh, each) for (ssh, _), each in zip(acts, futures, strict=True) if not each.done()]
            killed = {each for ssh, each in running if ssh.process.poll() is None}  # others have just ended, and have an answer
            for ssh, _ in running:
                ssh.kill()
    return [None if each in killed else each.result() for each in futures]
