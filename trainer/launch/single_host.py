"""Starting the ranks of a run on this machine, listening to them, and ending them together."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .rank.channel import hush
from .rank.environment import Place, reserve_port
from .supervisor.local_rank import start
from .supervisor.outcome import FAILED, Ended
from .supervisor.supervisor import Crew, Show
from .supervisor.watchdog import Watchdog

ADDRESS = "127.0.0.1"
TRIES = 3  # starts, where another process takes the port


def launch(
    command: Sequence[str],
    *,
    ranks: int,
    folder: Path,
    environment: Mapping[str, str],
    show: Show,
    grace: float,
    live: Show | None = None,
    watchdog: Watchdog | None = None,
    began: Callable[[int], None] | None = None,
    devices: Sequence[str] = (),
    asked: list[tuple[int, float]] | None = None,
) -> Ended:
    """Run `command` as so many ranks on this machine until all have ended, and say how.

    `environment` is all that the ranks inherit; what torch asks for is added. Each rank's output goes to
    `folder`/ranks/N.log; what rank 0 says (`talk.Talk`) goes to `show`, its live line to `live`. When a rank fails the
    others get SIGTERM, and after `grace` seconds SIGKILL. SIGINT, SIGTERM and SIGHUP to this process are handed on once
    as SIGTERM, with as much time as it takes; a second Ctrl-C kills. However this process dies, its ranks die too.
    Signals are heard in the main thread only. A run in which no rank comes further hangs (watchdog.py): its ranks write
    their stacks and are killed. `began` is told the first step. `devices` name the ranks' devices for the line that says
    how one ended. `asked` is what a `signals` around this one has noted.
    """
    logs = folder / "ranks"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return Ended(status=FAILED, ranks=(), says=f"no log can be written: {error}")
    with signals(asked) as told:
        for _ in range(TRIES):
            with ExitStack() as stack:
                port = stack.enter_context(reserve_port())
                crew = Crew(told, stack, show=show, live=live or hush, grace=grace, watchdog=watchdog or Watchdog(), began=began)
                ended = _run(crew, command, _places(ranks, port), logs, environment, devices)
            if told or not ended.port_taken:
                break
            show(f"{ended.says}: another process has the port")
        return ended


def _run(
    crew: Crew, command: Sequence[str], places: Sequence[Place], logs: Path, environment: Mapping[str, str], devices: Sequence[str]
) -> Ended:
    """Start all, stay until all have ended."""
    for place in places:
        try:
            crew.take(start(command, place, logs, environment, f"(device {devices[place.rank]})" if devices else ""))
        except OSError as error:
            return Ended(status=FAILED, ranks=(), rank=place.rank, says=f"rank {place.rank} can't be started: {error}")
    return crew.run()


def _places(ranks: int, port: socket.socket) -> list[Place]:
    number = port.getsockname()[1]
    return [Place(rank=rank, ranks=ranks, local_rank=rank, local_ranks=ranks, address=ADDRESS, port=number) for rank in range(ranks)]


@contextmanager
def signals(noted: list[tuple[int, float]] | None = None) -> Iterator[list[tuple[int, float]]]:
    """What this process was told while the block runs: (signal, time). One that it ignores (nohup) stays ignored.

    `noted` is what a block around this one notes, which then goes on doing that.
    """
    if noted is not None:
        yield noted
        return
    asked: list[tuple[int, float]] = []
    before: dict[signal.Signals, Any] = {}

    def note(number: int, _: object) -> None:
        asked.append((number, time.monotonic()))

    if threading.current_thread() is threading.main_thread():
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(each) not in (signal.SIG_IGN, None):
                before[each] = signal.signal(each, note)
    try:
        yield asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
