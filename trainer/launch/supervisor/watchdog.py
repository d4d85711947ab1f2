"""Finds a run that hangs: no rank has made progress for longer than this run's steps, saves and starts take."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from ..rank.group_record import GroupRecord
from .compare_collectives import compare_collectives

PATIENCE = 120.0  # least seconds that any phase may take
PHASE_FACTOR = 10  # times PATIENCE for a phase not seen before (a start, the first step, a save), times the longest so far for any other
HUNG_FACTOR = 2  # times the seconds at which a phase was killed as hung, until the run passes that step
STACKS_WAIT = 3.0  # seconds for stacks to be written
RECORDS_WAIT = 1.5  # further seconds, where some ranks have reported their collectives, for the others to do so
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>\S+)')
_THREAD = re.compile(r"^(Current thread|Thread) 0x\w+")


class WatchedRank(Protocol):
    """The progress of a rank (rank_record.py)."""

    rank: int
    step: int | None
    phase: str
    since: float
    longest: dict[str, float]
    collectives: tuple[GroupRecord, ...]

    def stack_lines(self) -> tuple[str, ...]:
        """Return the Python stacks of its threads, once it has written them."""
        ...


Rank = TypeVar("Rank", bound=WatchedRank)


@dataclass(kw_only=True)
class Watchdog:
    """Its limits are learned from the ranks; `patience` is the least, in seconds.

    `seen` holds the longest seconds that each phase took in earlier attempts of the run. `timed_out` maps a phase to the (step, seconds)
    at which it was killed as hung. It may only have been slow, so until the run passes that step the limit is at least twice those
    seconds; no more than that, so that a run which does hang there does not cost hours. `growth` is how many times as large as before the
    batch of a step may become (train.rampup).
    """

    patience: float = PATIENCE
    growth: float = 1.0
    seen: dict[str, float] = field(default_factory=dict)
    timed_out: dict[str, tuple[int, float]] = field(default_factory=dict)

    def learn(self, rank: WatchedRank) -> None:
        """Keep how long a rank that has ended took for each phase that it completed."""
        for phase, seconds in rank.longest.items():
            self.seen[phase] = max(self.seen.get(phase, 0.0), seconds)
        self.timed_out = {phase: (step, seconds) for phase, (step, seconds) in self.timed_out.items() if _step(rank) <= step}

    def note_timeout(self, running: Sequence[WatchedRank], ranks: Sequence[WatchedRank], idle: float) -> None:
        """Note that the `running` ranks are killed after `idle` seconds in their phases."""
        step = max(map(_step, ranks))
        self.timed_out |= dict.fromkeys({rank.phase for rank in running}, (step, idle))

    def overdue_seconds(self, running: Sequence[WatchedRank], ranks: Sequence[WatchedRank]) -> float | None:
        """Return the seconds since any rank made progress if they exceed the limit; `ranks` includes those that have ended."""
        if not running:
            return None
        idle = time.monotonic() - max(rank.since for rank in ranks)
        return idle if idle > self.patience and idle > self.limit(running, ranks) else None

    def limit(self, running: Sequence[WatchedRank], ranks: Sequence[WatchedRank]) -> float:
        """Return the seconds that the phases of the `running` ranks may take."""
        step = max(map(_step, ranks))
        return max(self._phase_limit(phase, ranks, step) for phase in {rank.phase for rank in running})

    def _phase_limit(self, phase: str, ranks: Sequence[WatchedRank], step: int) -> float:
        longest = self._longest(phase, ranks)
        if phase == "step" and longest == 0.0:
            longest = self._longest("first", ranks)  # which is a step too
        timeout_step, seconds = self.timed_out.get(phase, (-1, 0.0))
        factor = PHASE_FACTOR * (self.growth if phase == "step" else 1.0)
        learned = max(self.patience, factor * longest) if longest else PHASE_FACTOR * self.patience
        return max(learned, HUNG_FACTOR * seconds) if step <= timeout_step else learned

    def _longest(self, phase: str, ranks: Sequence[WatchedRank]) -> float:
        """Return the longest seconds that a phase took; 0 if no rank has completed it yet."""
        return max(self.seen.get(phase, 0.0), *(rank.longest.get(phase, 0.0) for rank in ranks))


class Hang(NamedTuple, Generic[Rank]):
    """The rank that most likely holds the others up, and the reason. Unless it `stands_out` it may well be another."""

    rank: Rank
    why: str
    stands_out: bool


def hung_rank(running: Sequence[Rank], idle: float) -> Hang[Rank]:
    """Return the rank that most likely holds the others up after `idle` seconds without progress.

    Where no rank stands out by its step or its stacks, it is the one that is behind all others in the collectives that the ranks have
    recorded.
    """
    hang = _by_steps_and_stacks(running, idle)
    finding = compare_collectives({rank.rank: rank.collectives for rank in running})
    if finding is None:
        return hang
    if finding.behind is None or hang.stands_out:
        return hang._replace(why=f"{hang.why}; {finding.says}")
    behind = next(rank for rank in running if rank.rank == finding.behind)
    why = hang.why if hang.rank is behind else _no_progress(idle)
    return Hang(behind, f"{why}; {finding.says}", stands_out=True)


def _by_steps_and_stacks(running: Sequence[Rank], idle: float) -> Hang[Rank]:
    """Return the rank that its steps and its stacks make the likeliest.

    It stands out if it alone, or a minority, is behind or does not answer, or if a minority is at other lines than the rest. Ranks that
    wait for a message are all at the same line where a device sends it, as over NCCL: then none does.
    """
    for_ = _no_progress(idle)
    behind, ahead = min(running, key=_step), max(running, key=_step)
    if _step(behind) < _step(ahead):
        late = [rank for rank in running if _step(rank) == _step(behind)]
        stands_out = len(late) == 1 or _is_minority(late, running)
        return Hang(behind, f"{for_}, while others are {_at_step(ahead)}", stands_out)
    mute = [rank for rank in running if not rank.stack_lines()]
    if mute and len(mute) < len(running):
        return Hang(mute[0], f"{for_}, and it does not answer" + _others(mute), len(mute) == 1 or _is_minority(mute, running))
    locations = {rank.rank: where for rank in running if (where := stack_location(rank.stack_lines()))}  # some stacks have no location
    usual = next((where for where, _ in Counter(locations.values()).most_common(1)), "")
    odd = [rank for rank in running if locations.get(rank.rank, usual) != usual]
    if odd:
        why = f"{for_}; it is in {locations[odd[0].rank]}, others are in {usual}" + _others(odd)
        return Hang(odd[0], why, _is_minority(odd, running))
    which = "all" if len(locations) == len(running) else f"{len(locations)} of {len(running)}"
    all_ = f"; {which} are in {usual}" if usual else "; none answers" if mute else ""
    return Hang(running[0], f"{for_}, and no other rank is further{all_}", stands_out=len(running) == 1)


def _no_progress(idle: float) -> str:
    return f"no progress for {idle:.0f} s"


def _is_minority(ranks: Sequence[WatchedRank], running: Sequence[WatchedRank]) -> bool:
    return 2 * len(ranks) < len(running)


def stack_location(stack: Sequence[str]) -> str:
    """Return where the main thread is: its innermost frame of this package in what faulthandler wrote; "" if there is none."""
    threads: list[list[re.Match[str]]] = []
    for line in stack:
        if _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append(frame)
    main = next((frames for frames in threads if frames and frames[-1]["name"] in ("<module>", "_run_code", "_run_module_as_main")), [])
    frame = next((frame for frame in main if "/trainer/" in frame["file"]), main[0] if main else None)
    return f"{frame['name']} ({frame['file'].rpartition('/')[2]} line {frame['line']})" if frame else ""


def _step(rank: WatchedRank) -> int:
    return -1 if rank.step is None else rank.step


def _at_step(rank: WatchedRank) -> str:
    return "still starting" if rank.step is None else f"at step {rank.step}"


def _others(ranks: Sequence[WatchedRank]) -> str:
    more = [str(rank.rank) for rank in ranks[1:]]
    return f"; so is rank {', '.join(more)}" if more else ""
