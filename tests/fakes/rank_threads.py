"""Fakes for tests of checkpoints and sinks: threads as ranks, and a limit on the size of files."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from distrain.tests.fakes.deadline import DEADLINE
from distrain.trainer.loop.checkpoint import Gather

ThreadResult = TypeVar("ThreadResult")


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limit the files that this process writes to `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run_on_ranks(world: int, work: Callable[[int, Gather], ThreadResult]) -> list[ThreadResult]:
    """Call `work` with a rank and a gather over all ranks in each of `world` threads; return the results by rank."""
    return [future.result() for future in _run_threads(world, work)]


def try_on_ranks(world: int, work: Callable[[int, Gather], Any]) -> list[Any]:
    """Do the same; a rank that raises has its exception in place of its result."""
    return [future.exception() or future.result() for future in _run_threads(world, work)]


def _run_threads(world: int, work: Callable[[int, Gather], ThreadResult]) -> list[Future[ThreadResult]]:
    lines, barrier = [""] * world, threading.Barrier(world, timeout=DEADLINE)

    def gather_of(rank: int) -> Gather:
        def gather(line: str) -> Sequence[str]:
            lines[rank] = line
            barrier.wait()
            gathered = list(lines)
            barrier.wait()
            return gathered

        return gather

    with ThreadPoolExecutor(world) as pool:
        return [pool.submit(work, rank, gather_of(rank)) for rank in range(world)]
