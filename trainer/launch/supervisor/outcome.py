"""How a run's ranks ended, and what that makes of the run: its exit status, and one line that names who ended it."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..rank.channel import STOPPED
from ..rank.log import Log, Tail, raised

TRAINED, FAILED = 0, 1
LINES = 20  # of a log, that an end shows
LONGEST = 400  # characters of a cause
LOOKED_AT = 2000  # lines of a log, in which its exception is looked for

Fate = Literal["ended", "keeper died", "stuck", "hung", "lost"]

# Why a process that nobody here killed may have been, where a signal's name says too little.
_PERHAPS: dict[int, str] = {
    signal.SIGKILL: "perhaps by the kernel for want of memory",
    signal.SIGBUS: "perhaps for want of shared memory: see df /dev/shm",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "a check in native code failed",
}
# What gloo, NCCL and torch's store say on a rank whose peer has gone: its end follows from another's.
_LOST_A_PEER = re.compile(
    "connection (closed|reset|refused|was likely closed)|closed by peer|reset by peer|broken pipe|failed to (recv|connect)"
    "|remote process exited|remote process exiting|ncclRemoteError|recvValue failed|sendBytes failed",
    re.IGNORECASE,
)
# What CUDA, NCCL, torch's timeouts and the system say of a device, a link or a file system that fails. A kernel that reads where it
# may not is to a GPU what SIGSEGV is to a process. Not here: out of memory, device-side assert, invalid usage, no space left.
_OF_A_MACHINE = re.compile(
    r"uncorrectable|\bECC error|\bXid\b|hardware (stack )?error|unspecified launch failure|fallen off the bus|GPU is lost"
    r"|illegal (memory access|instruction) was encountered|busy or unavailable|no CUDA-capable device"
    r"|NCCL (error|communicator)\b.*((system|cuda|internal|network) error|abort)|collective operation timeout|timed out waiting \d+ms"
    r"|input/output error|remote I/O error|stale (NFS )?file handle|transport endpoint is not connected|no such device"
    r"|connection timed out|connection abort|network is (down|unreachable)|host is down|no route to host",
    re.IGNORECASE,
)
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PORT_TAKEN = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """One rank's record: `code` is its exit status, or minus the signal that killed it."""

    rank: int
    code: int
    log: Log | Tail
    where: str = ""  # "host1 (device 1)", "(device 1)" on this machine alone, "" there without GPUs
    done: bool = False  # it said so
    first: int | None = None  # the step of its first beat
    step: int | None = None  # of its last
    beat: float | None = None  # when that was, on this machine's monotonic clock
    problem: str = ""  # in its own words
    refused: bool = False  # the problem is with what the user asked for
    told: bool = False  # it ended after SIGTERM had been sent to it
    cut: bool = False  # it ended after it was to be killed
    fate: Fate = "ended"  # "keeper died": the code is its keeper's; "lost": it is not known

    @property
    def host(self) -> str:
        """Its host's name; "" where there is one host."""
        return self.where.partition("(")[0].rstrip()

    @property
    def stopped(self) -> bool:
        """It was asked to stop, saved, and exited."""
        return self.code == STOPPED

    @property
    def well(self) -> bool:
        """It did what it was there for, or stopped with a checkpoint saved."""
        return not self.problem and (self.stopped or (self.done and self.code == 0))

    @property
    def obeyed(self) -> bool:
        """It ended because this was wanted of it, with nothing saved."""
        stopped = self.told and self.code in {each for stop in _STOPS for each in (-stop, 128 + stop)}
        return not self.problem and (stopped or (self.cut and self.code == -signal.SIGKILL))

    @property
    def blameless(self) -> bool:
        """It ended by what happens to machines, not by what a program does: a start from the last checkpoint may well go on."""
        if self.fate != "ended" or (self.code < 0 and not self.problem):
            return True
        return bool(_OF_A_MACHINE.search(self.cause)) or self.bereft

    @property
    def bereft(self) -> bool:
        """It ended because a peer, or the link to it, had gone: its own host need not be at fault."""
        return bool(_LOST_A_PEER.search(self.cause))

    @property
    def silent(self) -> bool:
        """It exited badly and left no word of why: as a rank does that leaves the telling to rank 0."""
        return self.code > 0 and not self.problem and not raised(self.log.last_lines(LOOKED_AT))

    @property
    def cause(self) -> str:
        """Why it ended, in its own words or its log's."""
        if self.problem or self.code in (0, -signal.SIGKILL) or self.fate != "ended":
            return _brief(self.problem)
        lines = self.log.last_lines(LOOKED_AT)
        return _brief(raised(lines) or (lines[-1] if lines and self.code > 0 else ""))


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run's end. `status` is the exit status of the command that launched it: 0 trained, 1 failed, 75 stopped and saved,
    130 and the like stopped without. `says` is one line ("" where it trained), `rank` whom it names, `tail` that rank's last lines,
    `hosts` those that could not be used or did not bring their ranks."""

    status: int
    ranks: tuple[RankEnd, ...]
    says: str = ""
    asked: bool = False  # it was told to stop, whether or not it obeyed
    rank: int | None = None
    log: Path | None = None
    tail: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    @property
    def culprit(self) -> RankEnd | None:
        """The end of the rank that it names."""
        return next((end for end in self.ranks if end.rank == self.rank), None)

    @property
    def refused(self) -> bool:
        """Whether its ranks refused what the user asked for, before they did anything of it."""
        return self.culprit is not None and self.culprit.refused and all(each.step is None for each in self.ranks)

    @property
    def port_taken(self) -> bool:
        """Whether it failed before its first step because another process listens at MASTER_PORT."""
        return self.status == FAILED and bool(_PORT_TAKEN.search(self.says)) and all(each.step is None for each in self.ranks)


def verdict(ends: Sequence[RankEnd], asked: int | None) -> Ended:
    """What the ranks' ends, in their order, make of the run; `asked` is the signal on which it was told to stop."""
    ranks = tuple(sorted(ends, key=lambda end: end.rank))
    if all(end.well for end in ends):
        stopped = any(end.stopped for end in ends)
        return Ended(status=STOPPED if stopped else TRAINED, ranks=ranks, says="stopped; a checkpoint is saved" if stopped else "")
    if asked is not None and all(end.well or end.obeyed for end in ends):
        return Ended(status=128 + asked, ranks=ranks, says=f"stopped by {signal.Signals(asked).name} before all ranks had saved")
    end = culprit(ends)
    told, tail = asked is not None, end.log.last_lines(LINES)
    return Ended(status=FAILED, ranks=ranks, says=sentence(end), asked=told, rank=end.rank, log=end.log.path, tail=tail)


def culprit(ends: Sequence[RankEnd]) -> RankEnd:
    """Whose end ended the others: the first bad one that doesn't itself follow from another's, one with a reason if there is one.

    Ranks of one host are lost together, in any order: the lowest stands for them.
    """
    bad = [end for end in ends if not end.well]
    own = [end for end in bad if not end.obeyed and not end.bereft]
    first = min(own or bad, key=lambda end: (end.silent, end.told))
    together = [end for end in bad if end.fate == first.fate == "lost" and end.host == first.host]
    return min(together, key=lambda end: end.rank, default=first)


def sentence(end: RankEnd) -> str:
    """A bad end in one line: rank, how, when, why, and where its log is. What a rank refuses is no fault of the rank: the reason alone."""
    if end.refused and end.problem:
        return end.cause
    cause = f": {end.cause}" if end.cause else ""
    where = f" on {end.where}" if end.host else f" {end.where}" if end.where else ""
    return f"rank {end.rank}{where} {_how(end)}{_when(end)}{cause}; its log is {end.log.path}"


def _how(end: RankEnd) -> str:
    if end.fate == "stuck":
        return "does not die of SIGKILL: its process is stuck in the kernel, most likely in a driver or a file system"
    if end.fate in ("hung", "lost"):
        return "hung" if end.fate == "hung" else "was lost"
    if end.problem and end.cut:
        return "failed and had to be killed"
    asked = end.cut or (end.told and end.code != -signal.SIGKILL)
    ended = _by_signal(-end.code, asked=asked) if end.code < 0 else f"exited with {end.code}"
    if end.fate == "keeper died":
        return f"lost the process that kept it, which {ended}"
    return f"{ended} before it was done" if end.code == 0 else ended


def _by_signal(number: int, *, asked: bool) -> str:
    """How a signal ended a rank, and why it may have come; nothing more of one that follows from a request to stop."""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    perhaps = "" if asked else _PERHAPS.get(number, "")
    return f"was killed by {name}, {perhaps}" if perhaps else f"was killed by {name}"


def _when(end: RankEnd) -> str:
    if end.done:
        return ", after it was done"
    return f", at step {end.step}" if end.step is not None else ""


def _brief(words: str) -> str:
    line = " ".join(words.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."
