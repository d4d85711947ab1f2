"""A rank as the launching process hears it, wherever it runs: what it said, how far it is, and its record when it has ended."""

from __future__ import annotations

import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from ..rank.log import Log, Tail
from .outcome import Fate, RankEnd

CHUNK = 1 << 16  # bytes that are read of a rank's words at once


class Heard(ABC):
    """`end` is the rank's record once it has ended, and nothing of it is left then. What it takes to reach it is a subclass's."""

    HEARD: ClassVar = ("say", "status")  # words for the user

    def __init__(self, rank: int, log: Log | Tail, where: str = "") -> None:
        self.rank = rank
        self.where = where  # as RankEnd.where
        self.log = log
        self.end: RankEnd | None = None
        self.problem = ""
        self.first: int | None = None  # the step of its first beat
        self.step: int | None = None  # of its last
        self.beat: float | None = None  # when that was
        self.phase = "start"  # what it is at: start, first (step), step, or what it said that it is at
        self.since = time.monotonic()  # when that began
        self.longest: dict[str, float] = {}  # seconds that it took at the most, by phase that it has been through
        self._half = b""  # a line that hasn't ended yet
        self._fate: Fate = "ended"
        self._done = False
        self._refused = False
        self._told = False
        self._cut = False

    @property
    @abstractmethod
    def control(self) -> int:
        """The file descriptor at which its words are read."""

    @property
    def failed(self) -> bool:
        """Whether it ended badly, or said that it will."""
        return bool(self.problem) or (self.end is not None and not self.end.well)

    def hear(self) -> Iterator[tuple[str, str]]:
        """Read some of what it has said, and keep it; its lines for the user as ("say" or "status", text)."""
        *lines, self._half = (self._half + self._read()).split(b"\n")
        for word, what in (pair for line in lines for pair in _words(line)):
            if word in self.HEARD:
                if self.phase == "start":
                    self._goes("start")
                yield word, str(what)
            else:
                self._note(word, what)

    def hang(self, says: str) -> None:
        """Its end, when it comes, is that of a rank that hung."""
        self._fate = "hung"
        self.problem = self.problem or says

    def look(self) -> str:
        """See that what keeps it can; what was done for that, in words, "" where nothing was."""
        return ""

    @abstractmethod
    def is_orphan(self) -> bool:
        """Whether nobody can say any more how it ends; what was said before may be unread."""

    @abstractmethod
    def lose(self) -> None:
        """Take such a rank for ended."""

    @abstractmethod
    def tell(self) -> None:
        """Ask it to stop, once: SIGTERM."""

    @abstractmethod
    def dump(self) -> None:
        """Have it write the Python stacks of its threads to its log."""

    @abstractmethod
    def stack(self) -> tuple[str, ...]:
        """What it wrote since; empty where it can't."""

    @abstractmethod
    def cut(self) -> None:
        """Have it killed, with all that it started."""

    @abstractmethod
    def abandon(self) -> None:
        """Wait no longer for one that was cut and is still there."""

    @abstractmethod
    def close(self, patience: float) -> None:
        """Nothing of it is left when this returns, but for what SIGKILL does not end in `patience` seconds."""

    @abstractmethod
    def _read(self) -> bytes:
        """What there is to be read; empty where there is nothing."""

    def _note(self, word: str, what: Any) -> None:
        match word, what:
            case "ended", int():
                self._ends(what, self._fate)
            case "beat", int():
                self._goes("first" if self.step is None else "step")
                self.first = what if self.first is None else self.first
                self.step, self.beat = what, self.since
            case "phase", str():
                self._goes(what)
            case "problem", _:
                self.problem = self.problem or str(what)
            case "refused", True:
                self._refused = True
            case "done", True:
                self._done = True

    def _goes(self, phase: str) -> None:
        """It has come to another phase, or to the next step."""
        now = time.monotonic()
        self.longest[self.phase] = max(self.longest.get(self.phase, 0.0), now - self.since)
        self.phase, self.since = phase, now

    def _ends(self, code: int, fate: Fate) -> None:
        self.end = RankEnd(
            rank=self.rank,
            where=self.where,
            code=code,
            log=self.log,
            done=self._done,
            first=self.first,
            step=self.step,
            beat=self.beat,
            problem=self.problem,
            refused=self._refused,
            told=self._told,
            cut=self._cut,
            fate=fate,
        )
        if self.end.well:  # what it was at last was the leaving: an end, or the save of one that was stopped
            self._goes("ended")


def _words(line: bytes) -> Iterator[tuple[str, Any]]:
    """What a line says; one that is no JSON object says nothing."""
    with contextlib.suppress(ValueError, RecursionError):
        said = json.loads(line)
        if isinstance(said, dict):
            yield from said.items()
