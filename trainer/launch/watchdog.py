"""Finding a run that hangs: no rank has come any further for longer than steps, saves and starts of this run take."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .heard import Heard

PATIENCE = 120.0  # seconds that anything may take, however short it was before
LONGER = 10  # times as long may take what was not seen before: a start, the first step, a save; and all else as the longest one so far
ANSWER = 3.0  # seconds for stacks to be written
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>\S+)')
_THREAD = re.compile(r"^(Current thread|Thread) 0x\w+")


@dataclass(kw_only=True)
class Watchdog:
    """How long it waits is learned from the ranks; `patience` is the least, in seconds.

    `seen` is the longest that each phase took in earlier starts of the run, in seconds: what was learned stays learned when a
    run starts again.
    """

    patience: float = PATIENCE
    seen: dict[str, float] = field(default_factory=dict)

    def learn(self, member: Heard) -> None:
        """Keep how long a rank took for each phase that it has been through."""
        for phase, seconds in member.longest.items():
            self.seen[phase] = max(self.seen.get(phase, 0.0), seconds)

    def limit(self, members: Sequence[Heard]) -> float:
        """Seconds that what the ranks are at may take."""
        return max(self._limit(member.phase, members) for member in members)

    def _limit(self, phase: str, members: Sequence[Heard]) -> float:
        longest = self._longest(phase, members)
        if phase == "step" and longest == 0.0:
            longest = self._longest("first", members)  # which is a step too
        return max(self.patience, LONGER * longest) if longest else LONGER * self.patience

    def _longest(self, phase: str, members: Sequence[Heard]) -> float:
        """Seconds that a phase took; 0 where no rank has been through it yet."""
        return max(self.seen.get(phase, 0.0), *(member.longest.get(phase, 0.0) for member in members))

    def overdue(self, left: Sequence[Heard], members: Sequence[Heard]) -> float | None:
        """Seconds since any of the ranks that are `left` came further, if that is too long; those that have ended teach too."""
        if not left:
            return None
        quiet = time.monotonic() - max(member.since for member in members)
        return quiet if quiet > max(self._limit(member.phase, members) for member in left) else None


def blamed(left: Sequence[Heard], quiet: float) -> tuple[Heard, str]:
    """Which of the ranks holds the others up after `quiet` seconds, and why that is thought of it."""
    behind = min(left, key=_reached)
    ahead = max(left, key=_reached)
    for_ = f"nothing for {quiet:.0f} s"
    if _reached(behind) < _reached(ahead):
        return behind, f"{for_}, while others are {_at(ahead)}"
    mute = [member for member in left if not member.stack()]
    if mute and len(mute) < len(left):
        return mute[0], f"{for_}, and it does not answer" + _others(mute)
    places = {member.rank: place(member.stack()) for member in left}
    usual, _ = Counter(places.values()).most_common(1)[0]
    odd = [member for member in left if places[member.rank] != usual]
    if odd:
        return odd[0], f"{for_}; it is in {places[odd[0].rank]}, others are in {usual}" + _others(odd)
    return left[0], f"{for_}, and no other rank is further" + (f"; all are in {usual}" if usual else "; none answers")


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


def _reached(member: Heard) -> int:
    return -1 if member.step is None else member.step


def _at(member: Heard) -> str:
    return "at their start" if member.step is None else f"at step {member.step}"


def _others(members: Sequence[Heard]) -> str:
    more = [str(member.rank) for member in members[1:]]
    return f"; so is rank {', '.join(more)}" if more else ""
