"""What tests of checkpoints and sinks need: ranks that are threads, and files that may not grow."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from distrain.trainer.loop.checkpoint import Gather

Answer = TypeVar("Answer")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """This process may write no file longer than `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def on_ranks(world: int, work: Callable[[int, Gather], Answer]) -> list[Answer]:
    """What each of `world` ranks (threads) gets from its work, given its rank and a gather over all of them."""
    return [future.result() for future in _done(world, work)]


def ends_on_ranks(world: int, work: Callable[[int, Gather], Any]) -> list[Any]:
    """The same, or what it raised."""
    return [future.exception() or future.result() for future in _done(world, work)]


def _done(world: int, work: Callable[[int, Gather], Answer]) -> list[Future[Answer]]:
    lines, barrier = [""] * world, threading.Barrier(world, timeout=60)

    def gather_of(rank: int) -> Gather:
        def gather(line: str) -> Sequence[str]:
            lines[rank] = line
            barrier.wait()
            every = list(lines)
            barrier.wait()
            return every

        return gather

    with ThreadPoolExecutor(world) as pool:
        return [pool.submit(work, rank, gather_of(rank)) for rank in range(world)]
