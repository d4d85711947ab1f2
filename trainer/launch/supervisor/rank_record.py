"""What the controller knows of a rank: its messages, its progress, and its outcome once it has ended."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from ..rank.channel import Fault
from ..rank.group_record import GroupRecord, group_records
from ..rank.log import RankLog, RemoteLog
from .outcome import Fate, RankOutcome

READ_SIZE = 1 << 16  # most bytes of one read of a rank's messages

Message = tuple[str, Any]  # kind and content, as rank/channel.py lists them


class RankRecord:
    """The record of one start of a rank; `outcome` is None until it has ended."""

    def __init__(self, rank: int, log: RankLog | RemoteLog, where: str = "") -> None:
        self.rank = rank
        self.where = where  # as RankOutcome.where
        self.log = log
        self.outcome: RankOutcome | None = None
        self.problem = ""
        self.first_step: int | None = None  # the first that it reported
        self.step: int | None = None  # the last that it reported
        self.last_step_at: float | None = None
        self.phase = "start"  # start, "first" (step), step, or the phase that it reported
        self.since = time.monotonic()  # when it last made progress
        self.longest: dict[str, float] = {}  # seconds without progress, the most in each phase
        self.done = False
        self.refused = False
        self.fault: Fault = ""
        self.checked: int | None = None  # as RankOutcome.checked
        self.collectives: tuple[GroupRecord, ...] = ()  # that it reported when it was last asked about a hang
        self.stop_requested = False
        self.killed = False
        self.fate: Fate = "ended"
        self._partial_line = b""

    @property
    def has_failed(self) -> bool:
        """Whether it failed, or reported a problem and so is about to."""
        return bool(self.problem) or (self.outcome is not None and not self.outcome.has_succeeded)

    def receive(self, data: bytes) -> list[Message]:
        """Record the messages in some bytes from the rank, and return them."""
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        messages = [message for line in lines for message in _messages(line)]
        for kind, content in messages:
            self._record(kind, content)
        return messages

    def record_end(self, code: int) -> None:
        """Record that it has ended, with an exit status or minus a signal."""
        self.outcome = RankOutcome(
            rank=self.rank,
            where=self.where,
            code=code,
            log=self.log,
            done=self.done,
            first_step=self.first_step,
            step=self.step,
            last_step_at=self.last_step_at,
            problem=self.problem,
            refused=self.refused,
            fault=self.fault,
            checked=self.checked,
            stop_requested=self.stop_requested,
            killed=self.killed,
            fate=self.fate,
        )
        if self.outcome.has_succeeded:  # its last phase was the exit, or the save of a rank that was asked to stop
            self._note_progress("ended")

    def record_hang(self, problem: str, *, stands_out: bool) -> None:
        """Record that it hung; it is about to be killed. Unless it `stands_out`, any rank may have held the others up."""
        self.fate = "hung" if stands_out else "hung with others"
        self.problem = self.problem or problem

    def _record(self, kind: str, content: Any) -> None:
        match kind, content:
            case "say" | "status", _ if self.phase == "start":
                self._note_progress("start")
            case "step", int():
                self._note_progress("first" if self.step is None else "step")
                self.first_step = content if self.first_step is None else self.first_step
                self.step, self.last_step_at = content, self.since
            case "phase", str():
                self._note_progress(content)
            case "problem", _:
                self.problem = self.problem or str(content)
            case "fault", "device" | "machine":
                self.fault = content
            case "collectives", _:
                self.collectives = group_records(content)
            case "checked", int():
                self.checked = content
            case "refused", True:
                self.refused = True
            case "done", True:
                self.done = True

    def _note_progress(self, phase: str) -> None:
        """Note that it has come to another phase, to the next step, or further in its phase."""
        now = time.monotonic()
        self.longest[self.phase] = max(self.longest.get(self.phase, 0.0), now - self.since)
        self.phase, self.since = phase, now


def _messages(line: bytes) -> Iterator[Message]:
    """Yield the messages of a line; a line that is no JSON object has none."""
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(line)
        if isinstance(content, dict):
            yield from content.items()
