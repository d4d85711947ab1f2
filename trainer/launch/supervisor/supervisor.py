"""The ranks of one start: listening to them, finding the one that fails or hangs, and ending them together."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack

from .outcome import Ended, RankEnd, verdict
from .rank_handle import Heard
from .watchdog import ANSWER, Watchdog, blamed

TICK = 0.2  # seconds between two looks at what no pipe tells
PATIENCE = 15.0  # seconds for a killed process to be gone
ALONE = 5.0  # seconds between the ends of ranks that have agreed to stop
TWICE = 0.15  # seconds in which a second Ctrl-C is the first one's echo: wrappers such as `uv run` send it on

Show = Callable[[str], None]


class Crew:
    """`asked` grows by (signal, time) when this process is told to stop; `began` is told rank 0's first step."""

    def __init__(
        self,
        asked: list[tuple[int, float]],
        stack: ExitStack,
        *,
        show: Show,
        live: Show,
        grace: float,
        watchdog: Watchdog,
        began: Callable[[int], None] | None = None,
    ) -> None:
        self._asked = asked
        self._stack = stack
        self._show = show
        self._live = live
        self._grace = grace
        self._watchdog = watchdog
        self._began = began
        self._members: list[Heard] = []
        self._ends: list[RankEnd] = []  # in the order in which they ended
        self._kill_at: float | None = None  # when those that are left are killed
        self._stopping = False
        self._alone_at: float | None = None  # when the others of one that has stopped should have stopped too
        self._stacks_at: float | None = None  # when the stacks of a run that hangs are written
        self._ears = stack.enter_context(selectors.DefaultSelector())
        stack.callback(self._close)

    def take(self, member: Heard) -> None:
        """One more rank, which was started."""
        self._members.append(member)
        self._ears.register(member.control, selectors.EVENT_READ, member)

    def run(self) -> Ended:
        """Stay until all have ended."""
        while self._left():
            self._listen()
            if self._asked and not self._stopping:
                self._show(f"{signal.Signals(self._asked[0][0]).name}: finishing the step and saving; Ctrl-C stops at once")
                self._stop()
            self._watch()
            self._end_together()
        return verdict(self._ends, self._asked[-1][0] if self._asked else None)

    def _left(self) -> list[Heard]:
        return [member for member in self._members if member.end is None]

    def _listen(self) -> None:
        """Hear what is said for a moment, and note who has ended."""
        for key, _ in self._ears.select(TICK):
            if isinstance(key.data, Heard):
                self._hear(key.data)
            else:
                key.data()
        for member in self._left():
            if said := member.look():
                self._show(said)
            if member.is_orphan():
                self._hear(member)
                if member.end is None:
                    member.lose()
                    self._note_end(member)

    def _hear(self, member: Heard) -> None:
        for word, text in member.hear():
            if member.rank == 0:
                (self._show if word == "say" else self._live)(text)
        if self._began and member.rank == 0 and member.first is not None:
            self._began(member.first)
            self._began = None
        if member.end is not None:
            self._note_end(member)

    def _note_end(self, member: Heard) -> None:
        assert member.end is not None
        self._ends.append(member.end)
        self._watchdog.learn(member)
        if member.end.stopped and self._alone_at is None:
            self._alone_at = time.monotonic() + ALONE
        self._ears.unregister(member.control)

    def _stop(self) -> None:
        self._stopping = True
        for member in self._members:
            member.tell()

    def _watch(self) -> None:
        """When no rank comes any further all write their stacks, and then the run ends by the one that holds the others up."""
        quiet = self._watchdog.overdue(self._left(), self._members) if self._kill_at is None else None
        if quiet is None:
            self._stacks_at = None
        elif self._stacks_at is None:
            self._stacks_at = time.monotonic() + ANSWER
            for member in self._left():
                member.dump()
        elif time.monotonic() >= self._stacks_at:
            self._watchdog.hangs(self._left(), self._members, quiet)
            member, why = blamed(self._left(), quiet)
            member.hang(why)
            self._kill_at = time.monotonic()

    def _end_together(self) -> None:
        """When one fails the others are told to stop, and killed after the grace."""
        now = time.monotonic()
        if self._kill_at is None and any(member.failed for member in self._members):
            self._kill_at = now + self._grace
            for member in self._members:
                if not member.problem:  # one that has said what is wrong is at its end already
                    member.tell()
        if not self._stopping and self._alone_at is not None and now >= self._alone_at:
            self._stop()  # ranks agree to stop together; one that has stopped alone holds the others up
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
