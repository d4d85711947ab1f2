"""Starting the ranks of a run on this machine, listening to them, and ending them together."""

from __future__ import annotations

import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .ended import FAILED, Ended, RankEnd, verdict
from .member import Member, start
from .place import Place, reserve_port

ADDRESS = "127.0.0.1"
TRIES = 3  # starts, where another process takes the port
TICK = 0.2  # seconds between two looks at what no pipe tells
PATIENCE = 15.0  # seconds for a killed process to be gone
TWICE = 0.15  # seconds in which a second Ctrl-C is the first one's echo: wrappers such as `uv run` send it on

Show = Callable[[str], None]


def launch(
    command: Sequence[str],
    *,
    ranks: int,
    folder: Path,
    environment: Mapping[str, str],
    show: Show,
    grace: float,
    live: Show | None = None,
) -> Ended:
    """Run `command` as so many ranks on this machine until all have ended, and say how.

    `environment` is all that the ranks inherit; what torch asks for is added. Each rank's output goes to
    `folder`/ranks/N.log; what rank 0 says (`talk.Talk`) goes to `show`, its live line to `live`. When a rank fails the
    others get SIGTERM, and after `grace` seconds SIGKILL. SIGINT, SIGTERM and SIGHUP to this process are handed on once
    as SIGTERM, with as much time as it takes; a second Ctrl-C kills. However this process dies, its ranks die too.
    Signals are heard in the main thread only.
    """
    logs = folder / "ranks"
    logs.mkdir(parents=True, exist_ok=True)
    with _signals() as asked:
        for _ in range(TRIES):
            with ExitStack() as stack:
                port = stack.enter_context(reserve_port())
                crew = Crew(asked, show, live or _hush, grace, stack)
                ended = crew.run(command, _places(ranks, port), logs, environment)
            if asked or not ended.port_taken:
                break
            show(f"{ended.says}: another process has the port")
        return ended


def _places(ranks: int, port: socket.socket) -> list[Place]:
    number = port.getsockname()[1]
    return [Place(rank=rank, ranks=ranks, local_rank=rank, local_ranks=ranks, address=ADDRESS, port=number) for rank in range(ranks)]


class Crew:
    """The ranks of one start. `asked` grows by (signal, time) when this process is told to stop."""

    def __init__(self, asked: list[tuple[int, float]], show: Show, live: Show, grace: float, stack: ExitStack) -> None:
        self._asked = asked
        self._show = show
        self._live = live
        self._grace = grace
        self._members: list[Member] = []
        self._ends: list[RankEnd] = []  # in the order in which they ended
        self._kill_at: float | None = None  # when those that are left are killed
        self._ears = stack.enter_context(selectors.DefaultSelector())
        stack.callback(self._close)

    def run(self, command: Sequence[str], places: Sequence[Place], logs: Path, environment: Mapping[str, str]) -> Ended:
        """Start all, stay until all have ended."""
        for place in places:
            try:
                member = start(command, place, logs, environment)
            except OSError as error:
                return Ended(status=FAILED, ranks=(), rank=place.rank, says=f"rank {place.rank} can't be started: {error}")
            self._members.append(member)
            self._ears.register(member.control, selectors.EVENT_READ, member)
        told = False
        while self._left():
            self._listen()
            if self._asked and not told:
                told = True
                self._stop()
            self._end_together()
        return verdict(self._ends, self._asked[-1][0] if self._asked else None)

    def _left(self) -> list[Member]:
        return [member for member in self._members if member.end is None]

    def _listen(self) -> None:
        """Hear what is said for a moment, and note who has ended."""
        for key, _ in self._ears.select(TICK):
            self._hear(key.data)
        for member in self._left():
            if member.is_orphan():
                self._hear(member)
                if member.end is None:
                    member.lose()
                    self._note_end(member)

    def _hear(self, member: Member) -> None:
        for word, text in member.hear():
            if member.rank == 0:
                (self._show if word == "say" else self._live)(text)
        if member.end is not None:
            self._note_end(member)

    def _note_end(self, member: Member) -> None:
        assert member.end is not None
        self._ends.append(member.end)
        self._ears.unregister(member.control)

    def _stop(self) -> None:
        self._show(f"{signal.Signals(self._asked[0][0]).name}: finishing the step and saving; Ctrl-C stops at once")
        for member in self._members:
            member.tell()

    def _end_together(self) -> None:
        """When one fails the others are told to stop, and killed after the grace."""
        now = time.monotonic()
        if self._kill_at is None and any(member.failed for member in self._members):
            self._kill_at = now + self._grace
            for member in self._members:
                if not member.problem:  # one that has said what is wrong is at its end already
                    member.tell()
        if self._insisted():
            self._kill_at = min(self._kill_at or now, now)
        if self._kill_at is not None and now >= self._kill_at:
            for member in self._left():
                member.cut()
        if self._kill_at is not None and now >= self._kill_at + PATIENCE:
            for member in self._left():
                member.abandon()
                self._note_end(member)

    def _insisted(self) -> bool:
        """Whether Ctrl-C came after a first signal."""
        return any(number == signal.SIGINT and at > self._asked[0][1] + TWICE for number, at in self._asked[1:])

    def _close(self) -> None:
        for member in self._members:
            member.cut()
        for member in self._members:
            member.close(PATIENCE)


@contextmanager
def _signals() -> Iterator[list[tuple[int, float]]]:
    """What this process was told while the block runs: (signal, time). One that it ignores (nohup) stays ignored."""
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


def _hush(_: str) -> None:
    """Live lines, where nobody shows them."""
