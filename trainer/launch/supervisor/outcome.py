"""How a run's ranks ended, and the run's outcome: its exit status, and one line that names the rank that ended it."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..rank.channel import STOPPED, Fault
from ..rank.log import SEARCHED_LINES, RankLog, RemoteLog, exception_line

TRAINED, FAILED = 0, 1
CONTINUES = "the same command continues"
TAIL_LINES = 20  # of a log, that an outcome keeps
MAX_CAUSE = 400  # characters

Fate = Literal["ended", "agent died", "stuck", "hung", "hung with others", "lost"]

# Likely causes of a signal that the controller did not send, where its name says too little.
_LIKELY_CAUSES: dict[int, str] = {
    signal.SIGKILL: "perhaps by the kernel for want of memory",
    signal.SIGBUS: "perhaps for want of shared memory: see df /dev/shm",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "a check in native code failed",
}
# What gloo, NCCL and torch's store report on a rank whose peer has gone, or does not come: another rank is the cause.
_LOST_PEER = re.compile(
    "connection (closed|reset|refused|was likely closed)|closed by peer|reset by peer|broken pipe|failed to (recv|connect)"
    "|remote process exited|remote process exiting|ncclRemoteError|recvValue failed|sendBytes failed"
    r"|collective operation timeout|timed out waiting \d+ms",
    re.IGNORECASE,
)
# What CUDA, NCCL and the system report about a device, a link or a file system that fails. An illegal memory access
# is included: on a GPU it is what SIGSEGV is in a process. Not included: out of memory, device-side assert, invalid usage, no space left.
_MACHINE_FAULT = re.compile(
    r"uncorrectable|\bECC error|\bXid\b|hardware (stack )?error|unspecified launch failure|fallen off the bus|GPU is lost"
    r"|illegal (memory access|instruction) was encountered|busy or unavailable|no CUDA-capable device"
    r"|NCCL (error|communicator)\b.*((system|cuda|internal|network) error|abort)"
    r"|input/output error|remote I/O error|stale (NFS )?file handle|transport endpoint is not connected|no such device"
    r"|connection timed out|connection abort|network is (down|unreachable)|host is down|no route to host",
    re.IGNORECASE,
)
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PORT_TAKEN = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """How one rank ended: `code` is its exit status, or minus the signal that killed it."""

    rank: int
    code: int
    log: RankLog | RemoteLog
    where: str = ""  # "host1 (device 1)"; "(device 1)" where there is one host; "" there without GPUs
    done: bool = False  # it sent `done`
    first_step: int | None = None  # the first that it reported
    step: int | None = None  # the last that it reported
    last_step_at: float | None = None  # when, on this machine's monotonic clock
    problem: str = ""  # that it reported
    refused: bool = False  # the problem is the user's, not the rank's
    fault: Fault = ""  # "device": the problem is that its device computes wrong; "machine": some rank's device, or a link, does
    checked: int | None = None  # steps of the run that were done at the last check of all devices without a fault
    stop_requested: bool = False  # it ended after SIGTERM had been sent to it
    killed: bool = False  # it ended after it was to be killed
    fate: Fate = "ended"  # "agent died": the code is the agent's; "lost": the code is unknown

    @property
    def host(self) -> str:
        """Its host's name; "" where there is one host."""
        return self.where.partition("(")[0].rstrip()

    @property
    def has_stopped(self) -> bool:
        """Whether it was asked to stop, saved, and exited."""
        return self.code == STOPPED

    @property
    def has_succeeded(self) -> bool:
        """Whether it finished its work, or stopped with a checkpoint saved."""
        return not self.problem and (self.has_stopped or (self.done and self.code == 0))

    @property
    def has_ended_on_request(self) -> bool:
        """Whether it ended because it was asked to stop or killed, without saving."""
        stopped = self.stop_requested and self.code in {each for stop in _STOPS for each in (-stop, 128 + stop)}
        return not self.problem and (stopped or (self.killed and self.code == -signal.SIGKILL))

    @property
    def is_machine_fault(self) -> bool:
        """Whether a machine failed rather than the program, so that a restart from the last checkpoint may succeed."""
        if self.fault or self.fate != "ended" or (self.code < 0 and not self.problem):
            return True
        return bool(_MACHINE_FAULT.search(self.cause)) or self.has_lost_peer

    @property
    def has_lost_peer(self) -> bool:
        """Whether it ended because a peer, or the link to it, had gone: its own host need not be at fault."""
        return bool(_LOST_PEER.search(self.cause))

    @property
    def has_no_reason(self) -> bool:
        """Whether it failed and reported no reason, like a rank that leaves the report to rank 0."""
        return self.code > 0 and not self.problem and not exception_line(self.log.last_lines(SEARCHED_LINES))

    @property
    def cause(self) -> str:
        """Why it ended: the problem that it reported, or what its log says."""
        if self.problem or self.code in (0, -signal.SIGKILL) or self.fate != "ended":
            return _one_line(self.problem)
        lines = self.log.last_lines(SEARCHED_LINES)
        return _one_line(exception_line(lines) or (lines[-1] if lines and self.code > 0 else ""))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended. `status` is the exit status of the command that launched it: 0 trained, 1 failed, 75 stopped with a checkpoint
    saved, 128 + signal stopped without. `says` is one line ("" if it trained), `rank` the rank that it names, `tail` the last lines of
    that rank's log, `hosts` those that could not be used or on which ranks did not register. `has_stepped`: whether any attempt has begun
    a step."""

    status: int
    ranks: tuple[RankOutcome, ...]
    says: str = ""
    stop_requested: bool = False  # whether or not it stopped because of that
    rank: int | None = None
    log: Path | None = None
    tail: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    has_stepped: bool = False

    @property
    def root_cause(self) -> RankOutcome | None:
        """The outcome of the rank that `says` names."""
        return next((each for each in self.ranks if each.rank == self.rank), None)

    @property
    def is_refused(self) -> bool:
        """Whether the ranks refused what the user asked for, before their first step."""
        return self.root_cause is not None and self.root_cause.refused and all(each.step is None for each in self.ranks)

    @property
    def is_port_taken(self) -> bool:
        """Whether it failed before its first step because another process listens at MASTER_PORT."""
        return self.status == FAILED and bool(_PORT_TAKEN.search(self.says)) and all(each.step is None for each in self.ranks)


def run_outcome(ended: Sequence[RankOutcome], stop_signal: int | None) -> Outcome:
    """Return a run's outcome from its ranks', in the order in which they ended; `stop_signal` is the one that asked the run to stop."""
    ranks = tuple(sorted(ended, key=lambda each: each.rank))
    if all(each.has_succeeded for each in ended):
        if not any(each.has_stopped for each in ended):
            return Outcome(status=TRAINED, ranks=ranks)
        has_stepped = any(each.step is not None for each in ranks)
        at = "stopped; a checkpoint is saved:" if has_stepped else "stopped before the first step;"
        return Outcome(status=STOPPED, ranks=ranks, says=f"{at} {CONTINUES}")
    if stop_signal is not None and all(each.has_succeeded or each.has_ended_on_request for each in ended):
        name = signal.Signals(stop_signal).name
        at_once = any(each.killed and not each.has_succeeded for each in ended)
        says = f"stopped at once by {name}" if at_once else f"stopped by {name} before all ranks had saved"
        return Outcome(status=128 + stop_signal, ranks=ranks, says=says)
    cause = root_cause(ended)
    return Outcome(
        status=FAILED,
        ranks=ranks,
        says=failure_text(cause),
        stop_requested=stop_signal is not None,
        rank=cause.rank,
        log=cause.log.path,
        tail=cause.log.last_lines(TAIL_LINES),
    )


def root_cause(ended: Sequence[RankOutcome]) -> RankOutcome:
    """Return the failed rank that ended the others: the first whose failure does not follow from another's, preferably one with a reason.

    Ranks of one host are lost together, in any order: the lowest is returned.
    """
    failed = [each for each in ended if not each.has_succeeded]
    own = [each for each in failed if not each.has_ended_on_request and not each.has_lost_peer]
    first = min(own or failed, key=lambda each: (each.has_no_reason, each.stop_requested))
    together = [each for each in failed if each.fate == first.fate == "lost" and each.host == first.host]
    return min(together, key=lambda each: each.rank, default=first)


def failure_text(failed: RankOutcome) -> str:
    """Return one line about a failed rank: its number, how, when and why it failed, its log; only the reason if it refused the request."""
    if failed.refused and failed.problem:
        return failed.cause
    cause = f": {failed.cause}" if failed.cause else ""
    where = f" on {failed.where}" if failed.host else f" {failed.where}" if failed.where else ""
    return f"rank {failed.rank}{where} {_how(failed)}{_when(failed)}{cause}; its log is {failed.log.path}"


def _how(failed: RankOutcome) -> str:
    if failed.fate == "stuck":
        return "does not die of SIGKILL: its process is stuck in the kernel, most likely in a driver or a file system"
    if failed.fate in ("hung", "hung with others", "lost"):
        return "was lost" if failed.fate == "lost" else "hung"
    if failed.problem and failed.killed:
        return "failed and had to be killed"
    requested = failed.killed or (failed.stop_requested and failed.code != -signal.SIGKILL)
    ended = _by_signal(-failed.code, requested=requested) if failed.code < 0 else f"exited with {failed.code}"
    if failed.fate == "agent died":
        return f"lost its agent process, which {ended}"
    return f"{ended} before it was done" if failed.code == 0 else ended


def _by_signal(number: int, *, requested: bool) -> str:
    """Return how a signal ended a rank, with its likely cause unless the signal was sent on request."""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    cause = "" if requested else _LIKELY_CAUSES.get(number, "")
    return f"was killed by {name}, {cause}" if cause else f"was killed by {name}"


def _when(failed: RankOutcome) -> str:
    if failed.done:
        return ", after it was done"
    return f", at step {failed.step}" if failed.step is not None else ""


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_CAUSE else f"{line[:MAX_CAUSE]} ..."
