"""Finding a run that hangs: no rank has come any further for longer than steps, saves and starts of this run take."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

PATIENCE = 120.0  # seconds that anything may take, however short it was before
LONGER = 10  # times as long may take what was not seen before: a start, the first step, a save; and all else as the longest one so far
DOUBT = 2  # times as long is waited for what was taken to hang before, at the same step
ANSWER = 3.0  # seconds for stacks to be written
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>\S+)')
_THREAD = re.compile(r"^(Current thread|Thread) 0x\w+")


class Watched(Protocol):
    """A rank, as far as its progress goes (heard.py)."""

    rank: int
    step: int | None
    phase: str
    since: float
    longest: dict[str, float]

    def stack(self) -> tuple[str, ...]:
        """The Python stacks of its threads, once it has written them."""
        ...


Rank = TypeVar("Rank", bound=Watched)


@dataclass(kw_only=True)
class Watchdog:
    """How long it waits is learned from the ranks; `patience` is the least, in seconds.

    `seen` is the longest that each phase took in earlier starts of the run, in seconds, and `hung` what was not waited for any
    longer: by phase, the step that the run had come to and the seconds. That may have been no hang, so that more is waited until
    the run is past that step; not so much more that one which does hang there costs hours.
    """

    patience: float = PATIENCE
    seen: dict[str, float] = field(default_factory=dict)
    hung: dict[str, tuple[int, float]] = field(default_factory=dict)

    def learn(self, member: Watched) -> None:
        """Keep how long a rank that has ended took for each phase that it has been through."""
        for phase, seconds in member.longest.items():
            self.seen[phase] = max(self.seen.get(phase, 0.0), seconds)
        self.hung = {phase: (step, seconds) for phase, (step, seconds) in self.hung.items() if _reached(member) <= step}

    def hangs(self, left: Sequence[Watched], members: Sequence[Watched], quiet: float) -> None:
        """The ranks that are `left` are ended after so many seconds in what they are at."""
        reached = max(map(_reached, members))
        self.hung |= dict.fromkeys({member.phase for member in left}, (reached, quiet))

    def overdue(self, left: Sequence[Watched], members: Sequence[Watched]) -> float | None:
        """Seconds since any of the ranks that are `left` came further, if that is too long; those that have ended teach too."""
        if not left:
            return None
        quiet = time.monotonic() - max(member.since for member in members)
        return quiet if quiet > self.patience and quiet > self.limit(left, members) else None

    def limit(self, left: Sequence[Watched], members: Sequence[Watched]) -> float:
        """Seconds that what the ranks are at may take."""
        reached = max(map(_reached, members))
        return max(self._limit(phase, members, reached) for phase in {member.phase for member in left})

    def _limit(self, phase: str, members: Sequence[Watched], reached: int) -> float:
        longest = self._longest(phase, members)
        if phase == "step" and longest == 0.0:
            longest = self._longest("first", members)  # which is a step too
        step, seconds = self.hung.get(phase, (-1, 0.0))
        learned = max(self.patience, LONGER * longest) if longest else LONGER * self.patience
        return max(learned, DOUBT * seconds) if reached <= step else learned

    def _longest(self, phase: str, members: Sequence[Watched]) -> float:
        """Seconds that a phase took; 0 where no rank has been through it yet."""
        return max(self.seen.get(phase, 0.0), *(member.longest.get(phase, 0.0) for member in members))


def blamed(left: Sequence[Rank], quiet: float) -> tuple[Rank, str]:
    """Which of the ranks holds the others up after `quiet` seconds, and why that is thought of it."""
    behind = min(left, key=_reached)
    ahead = max(left, key=_reached)
    for_ = f"nothing for {quiet:.0f} s"
    if _reached(behind) < _reached(ahead):
        return behind, f"{for_}, while others are {_at(ahead)}"
    mute = [member for member in left if not member.stack()]
    if mute and len(mute) < len(left):
        return mute[0], f"{for_}, and it does not answer" + _others(mute)
    places = {member.rank: where for member in left if (where := place(member.stack()))}  # some stacks say nothing
    usual = next((where for where, _ in Counter(places.values()).most_common(1)), "")
    odd = [member for member in left if places.get(member.rank, usual) != usual]
    if odd:
        return odd[0], f"{for_}; it is in {places[odd[0].rank]}, others are in {usual}" + _others(odd)
    which = "all" if len(places) == len(left) else f"{len(places)} of {len(left)}"
    all_ = f"; {which} are in {usual}" if usual else "; none answers" if mute else ""
    return left[0], f"{for_}, and no other rank is further{all_}"


def place(stack: Sequence[str]) -> str:
    """Where the main thread is: its innermost frame of this package, from what faulthandler wrote; "" where none is found."""
    threads: list[list[re.Match[str]]] = []
    for line in stack:
        if _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append(frame)
    main = next((frames for frames in threads if frames and frames[-1]["name"] in ("<module>", "_run_code", "_run_module_as_main")), [])
    frame = next((frame for frame in main if "/trainer/" in frame["file"]), main[0] if main else None)
    return f"{frame['name']} ({frame['file'].rpartition('/')[2]} line {frame['line']})" if frame else ""


def _reached(member: Watched) -> int:
    return -1 if member.step is None else member.step


def _at(member: Watched) -> str:
    return "at their start" if member.step is None else f"at step {member.step}"


def _others(members: Sequence[Watched]) -> str:
    more = [str(member.rank) for member in members[1:]]
    return f"; so is rank {', '.join(more)}" if more else ""
