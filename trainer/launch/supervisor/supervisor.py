"""Supervises the ranks of one attempt: reads their messages, finds the one that fails or hangs, and ends them together."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack

from ...system.stop_requests import StopRequests
from .outcome import Outcome, RankOutcome, run_outcome
from .rank_handle import RankHandle
from .watchdog import RECORDS_WAIT, STACKS_WAIT, Watchdog, hung_rank

TICK = 0.2  # seconds between two checks of events that no pipe reports
PATIENCE = 15.0  # seconds for a killed process to be gone
STOP_TOGETHER = 5.0  # seconds between the ends of ranks that have agreed to stop
ECHO = 0.15  # seconds in which a second Ctrl-C is a copy of the first: wrappers such as `uv run` forward it

Show = Callable[[str], None]


class Supervisor:
    """The ranks of one attempt. `stop_requests` collects signals to this process; `on_first_step` is called with rank 0's first step."""

    def __init__(
        self,
        stop_requests: StopRequests,
        stack: ExitStack,
        *,
        show: Show,
        live: Show,
        grace: float,
        watchdog: Watchdog,
        on_first_step: Callable[[int], None] | None = None,
    ) -> None:
        self._stop_requests = stop_requests
        self._stack = stack
        self._show = show
        self._live = live
        self._grace = grace
        self._watchdog = watchdog
        self._on_first_step = on_first_step
        self._ranks: list[RankHandle] = []
        self._outcomes: list[RankOutcome] = []  # in the order in which the ranks ended
        self._stopping = False
        self._kill_at: float | None = None  # when the remaining ranks are killed
        self._stop_others_at: float | None = None  # once a rank has stopped: when the others should have stopped too
        self._read_stacks_at: float | None = None  # when the stacks of a run that hangs are written
        self._selector = stack.enter_context(selectors.DefaultSelector())
        stack.callback(self._close)

    def add(self, rank: RankHandle) -> None:
        """Add a rank that was started."""
        self._ranks.append(rank)
        self._selector.register(rank.fd, selectors.EVENT_READ, rank)

    def run(self) -> Outcome:
        """Supervise until all ranks have ended."""
        while self._running_ranks():
            self._poll()
            if self._stop_requests and not self._stopping:
                self._show(f"{signal.Signals(self._stop_requests[0][0]).name}: {stop_text(self._ranks[0])}")
                self._request_stop()
            self._watch_for_hang()
            self._end_together()
        return run_outcome(self._outcomes, self._stop_requests[-1][0] if self._stop_requests else None)

    def _running_ranks(self) -> list[RankHandle]:
        return [rank for rank in self._ranks if rank.outcome is None]

    def _poll(self) -> None:
        """Read messages for up to a TICK, and record the ranks that have ended."""
        for key, _ in self._selector.select(TICK):
            if isinstance(key.data, RankHandle):
                self._read_messages(key.data)
            else:
                key.data()
        for rank in self._running_ranks():
            if line := rank.wake_agent():
                self._show(line)
            if rank.is_orphan():
                self._read_messages(rank)
                if rank.outcome is None:
                    rank.record_lost_agent()
                    self._note_end(rank)

    def _read_messages(self, rank: RankHandle) -> None:
        for kind, content in rank.read_messages():
            if rank.rank == 0 and kind in ("say", "status"):
                (self._show if kind == "say" else self._live)(str(content))
        if self._on_first_step and rank.rank == 0 and rank.first_step is not None:
            self._on_first_step(rank.first_step)
            self._on_first_step = None
        if rank.outcome is not None:
            self._note_end(rank)

    def _note_end(self, rank: RankHandle) -> None:
        assert rank.outcome is not None
        self._outcomes.append(rank.outcome)
        self._watchdog.learn(rank)
        if rank.outcome.has_stopped and self._stop_others_at is None:
            self._stop_others_at = time.monotonic() + STOP_TOGETHER
        self._selector.unregister(rank.fd)

    def _request_stop(self) -> None:
        self._stopping = True
        for rank in self._ranks:
            rank.request_stop()

    def _watch_for_hang(self) -> None:
        """When no rank makes progress, have all write their stacks; then end the run, and blame the rank that holds the others up."""
        idle = self._watchdog.overdue_seconds(self._running_ranks(), self._ranks) if self._kill_at is None else None
        if idle is None:
            self._read_stacks_at = None
        elif self._read_stacks_at is None:
            self._read_stacks_at = time.monotonic() + STACKS_WAIT
            for rank in self._running_ranks():
                rank.collectives = ()
                rank.dump_stacks()
        elif time.monotonic() >= self._read_stacks_at + (RECORDS_WAIT if self._awaits_records() else 0.0):
            self._watchdog.note_timeout(self._running_ranks(), self._ranks, idle)
            hang = hung_rank(self._running_ranks(), idle)
            hang.rank.record_hang(hang.why, stands_out=hang.stands_out)
            self._kill_at = time.monotonic()

    def _awaits_records(self) -> bool:
        """Return whether some ranks have reported their collectives and others have not."""
        return 0 < sum(bool(rank.collectives) for rank in self._running_ranks()) < len(self._running_ranks())

    def _end_together(self) -> None:
        """When a rank fails, ask the others to stop, and kill them after the grace."""
        now = time.monotonic()
        if self._kill_at is None and any(rank.has_failed for rank in self._ranks):
            self._kill_at = now + self._grace
            for rank in self._ranks:
                if not rank.problem:  # a rank that has reported a problem is ending already
                    rank.request_stop()
        if not self._stopping and self._stop_others_at is not None and now >= self._stop_others_at:
            self._request_stop()  # ranks agree to stop together; one that has stopped alone holds the others up
        if self._is_stop_urgent():
            self._kill_at = min(self._kill_at or now, now)
        if self._kill_at is not None and now >= self._kill_at:
            for rank in self._running_ranks():
                rank.kill()
        if self._kill_at is not None and now >= self._kill_at + PATIENCE:
            for rank in self._running_ranks():
                rank.give_up()
                self._note_end(rank)

    def _is_stop_urgent(self) -> bool:
        """Return whether Ctrl-C came after a first signal."""
        first_at = self._stop_requests[0][1] if self._stop_requests else 0.0
        return any(number == signal.SIGINT and at > first_at + ECHO for number, at in self._stop_requests[1:])

    def _close(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.close(PATIENCE)


def stop_text(rank: RankHandle) -> str:
    """Return what a run does that was asked to stop, by the step of one of its ranks; the first of an attempt may compile for minutes."""
    if rank.step is None:
        return "stopping before the first step; Ctrl-C stops at once"
    if rank.step == rank.first_step:
        return "finishing the first step and saving; Ctrl-C stops at once, and loses that step alone"
    return "finishing the step and saving; Ctrl-C stops at once"
