"""Processes that measure one machine at the same time."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.managers import SyncManager
from threading import BrokenBarrierError
from typing import Any, NamedTuple

from ..system.parent_watch import die_with_parent
from ..system.reserved_port import reserve_port

LONGEST_WAIT = 120.0  # seconds that a process waits for the others

Show = Callable[[str], object]


class PoolProcess(NamedTuple):
    """What one of the processes knows of the others: its rank among `ranks`, a free port, a barrier of all, a queue of lines to show."""

    rank: int
    ranks: int
    port: int
    barrier: Any
    lines: Any

    def wait_and_show(self, text: str) -> None:
        """Wait for the other processes, then show what they all do next; raises BrokenBarrierError where one of them has failed."""
        self.barrier.wait()
        if self.rank == 0:
            self.lines.put(text)


def start_method(*, has_gpus: bool) -> str:
    """Return how the processes start: forked, with torch imported, or spawned, which takes twice the time; a CUDA context does not survive
    a fork."""
    return "fork" if sys.platform == "linux" and not has_gpus else "spawn"


def run_processes(measure: Callable[[PoolProcess], Any], count: int, start: str, show: Show = lambda text: None) -> list[Any]:
    """Call `measure` in `count` processes at once and return what each returned, by rank; raises what one of them raised.

    None of them outlives this process.
    """
    context = get_context(start)
    manager, last = SyncManager(ctx=context), (die_with_parent, (os.getpid(),))
    manager.start(*last)
    with manager, reserve_port() as reserved:
        port = reserved.getsockname()[1]
        barrier, lines = manager.Barrier(count, None, LONGEST_WAIT), manager.Queue()
        with context.Pool(count, *last) as pool:
            answers = [pool.apply_async(_call, (measure, PoolProcess(rank, count, port, barrier, lines))) for rank in range(count)]
            while not all(answer.ready() for answer in answers):
                with suppress(queue.Empty):
                    show(lines.get(timeout=0.1))
            failed = [answer for answer in answers if not answer.successful()]
            for answer in sorted(failed, key=_is_broken_barrier):
                answer.get()
            return [answer.get() for answer in answers]


def _is_broken_barrier(answer: Any) -> bool:
    """Whether a process failed only because another one did."""
    try:
        answer.get()
    except BrokenBarrierError:
        return True
    except Exception:
        return False
    return False


def _call(measure: Callable[[PoolProcess], Any], process: PoolProcess) -> Any:
    """Call `measure`; where it fails, the others do not wait for this process any longer."""
    try:
        return measure(process)
    except BaseException:
        process.barrier.abort()
        raise
