"""Breaks real runs, as a seed says, and holds what is left of them against what must be true whatever broke.

Run `python -m distrain.scripts.faults [faults=200] [hosts=40] [seed=1] [runner=pdsh] [folder=DIR]`: of so many faults, so many come to
runs over two hosts, which are namespaces of this machine (root, with openssh-server, pdsh or openmpi-bin, iproute2 and util-linux); a
full disk is a small tmpfs (root). Each comes to a `distrain fit` of a small GPT with two ranks, which is started again until it has
trained, faults and all:

    kill, term, stop      SIGKILL, SIGTERM or SIGSTOP to any process of the run, at any moment from its start to its end
    truncated, flipped    a file of the newest checkpoint cut off at any byte, or one bit of it turned
    full                  no room left on the disk, or almost none
    poison                a gradient of one rank is no number
    cut                   the link of a host

What must be true after each: no process of the run is left (within a minute; the seconds are reported), it exits 0 only where it has
trained and its last checkpoint verifies, else as the fault allows; the newest checkpoint that verifies is no older than before; each
step that it did has the loss of the uninterrupted run; and it said what was wrong in its own words, without a traceback.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT
from statistics import median
from tempfile import mkdtemp

from ..trainer.system.child_process import end_child
from .faults_drawn import FILE_DAMAGES, SIGNALS, Fault, draw_faults
from .faults_runs import (
    STEPS,
    Disk,
    FitProcess,
    HostRuns,
    LocalRuns,
    loss_curve,
    metric_rows,
    newest_checkpoint,
    process_role,
    send_signal,
    wait_until,
)
from .virtual_hosts import VirtualHosts, missing_tools

EXIT_SECONDS = 60.0  # seconds for all processes to be gone
RUN_SECONDS = 180.0  # seconds in which a run that was broken ends
STOPPED_SECONDS = 3.0  # seconds for which the command itself is stopped
FAULTS_PER_RUN = 6  # faults that come to one run, then it is left to finish


@dataclass(frozen=True, kw_only=True)
class FaultResult:
    """What came of a fault; `broken` is what should have been true."""

    fault: Fault
    target: str  # what it hit
    status: int
    seconds: float | None  # from the fault to the last process's end, where the run ended by it
    went_on: bool  # it trained to its end all the same
    violations: tuple[str, ...]
    says: str  # its last line


class Campaign:
    """Runs of one ground, one after another, each with its faults."""

    def __init__(self, ground: LocalRuns, disk: Disk | None, show: Callable[[str], None]) -> None:
        self.ground, self.disk, self.show = ground, disk, show
        self.runs = 0
        self.violations = 0  # runs that, left alone, did not come to their end
        self.folder = Path()
        self.came = 0  # faults that came to this run
        self._next()
        fit = ground.start(self.folder)
        wait_until(lambda: self._done() > 0 or fit.has_ended(), RUN_SECONDS)
        self.start = time.monotonic() - fit.began  # seconds to the first step
        wait_until(fit.has_ended, RUN_SECONDS)
        self.whole = loss_curve(self.folder / "run")
        if fit.process.returncode or len(self.whole) != STEPS:
            sys.exit(f"the run does not even train undisturbed: {fit.lines[-1] if fit.lines else ''} ({fit.log})")
        self._next()

    def apply(self, fault: Fault) -> FaultResult:
        """Let a fault come to a start of the run, and look at what it leaves."""
        if self._done() >= STEPS or self.came >= FAULTS_PER_RUN:
            self.finish()
            self._next()
        self.came += 1
        if fault.kind in FILE_DAMAGES and newest_checkpoint(self.run).checkpoint is None:
            self._to(fault)
        before, poison = self._newest(), ""
        whom: str = fault.kind
        if fault.kind in FILE_DAMAGES:
            whom = self._damage(fault)
            before = self._newest()
        target = self._done() + 1 + int(fault.moment * (STEPS - self._done() - 1))
        if fault.kind == "poison":
            whom, poison = f"rank {int(fault.target * 2)}", f"{target} {int(fault.target * 2)}"
        fit = self.ground.start(self.folder, f"launch.restarts={fault.restarts}", poison=poison)
        at = fit.began
        if fault.kind in SIGNALS or fault.kind in ("full", "cut"):
            self._wait_for(fault, fit, target)
            before, at = max(before, self._newest()), time.monotonic()
            whom = self._strike(fault, fit) or whom
        broken = [] if wait_until(fit.has_ended, RUN_SECONDS) else [f"it did not end within {RUN_SECONDS:.0f} s"]
        if not wait_until(lambda: not self.ground.processes(), EXIT_SECONDS):
            left = "; ".join(sorted({process_role(words) for words in self.ground.processes().values()}))
            broken.append(f"processes are left after {EXIT_SECONDS:.0f} s: {left}")
        seconds = time.monotonic() - at
        self._tidy()
        if not fit.has_ended():
            fit.process.kill()
        status = fit.process.wait()
        broken.extend(self._wrong(fault, whom, fit, status, before))
        says = fit.lines[-1] if fit.lines else ""
        trained = status == 0
        return FaultResult(
            fault=fault,
            target=whom,
            status=status,
            seconds=None if trained else seconds,
            went_on=trained,
            violations=tuple(broken),
            says=says,
        )

    def finish(self) -> None:
        """Let the run train to its end, undisturbed."""
        fit = self.ground.start(self.folder)
        status = fit.process.returncode if wait_until(fit.has_ended, RUN_SECONDS) else -1
        end_child(fit.process)
        if broken := list(self._wrong(None, "", fit, status, 0)):
            self.violations += 1
            self.show(f"    BROKEN: undisturbed, at last: {'; '.join(broken)} ({self.folder})")

    @property
    def run(self) -> Path:
        """RUN_DIR."""
        return self.folder / "run"

    def _next(self) -> None:
        self.runs, self.came = self.runs + 1, 0
        self.folder = self.ground.folder / f"{self.runs}"
        self.folder.mkdir()

    def _done(self) -> int:
        return max(loss_curve(self.run), default=0)

    def _newest(self) -> int:
        checkpoint = newest_checkpoint(self.run).checkpoint
        return checkpoint.step if checkpoint else 0

    def _to(self, fault: Fault) -> None:
        """Train to a few checkpoints, so that there is one to be damaged."""
        fit = self.ground.start(self.folder)
        wait_until(lambda: self._done() > 20 + 40 * fault.moment or fit.has_ended(), RUN_SECONDS)
        send_signal(fit.process.pid, SIGNALS["term"])
        wait_until(fit.has_ended, RUN_SECONDS)

    def _damage(self, fault: Fault) -> str:
        """Cut a file of the newest checkpoint off, or turn one of its bits."""
        checkpoint = newest_checkpoint(self.run).checkpoint
        assert checkpoint is not None
        file = Path(fault.pick(sorted(str(path) for path in checkpoint.path.rglob("*") if path.is_file())))
        at = int(fault.where * file.stat().st_size)
        with file.open("r+b") as open_:
            if fault.kind == "truncated":
                open_.truncate(at)
            else:
                open_.seek(at)
                (byte,) = open_.read(1)
                open_.seek(at)
                open_.write(bytes([byte ^ (1 << int(fault.jitter * 8))]))
        return f"{file.name} at byte {at:,}"

    def _wait_for(self, fault: Fault, fit: FitProcess, target: int) -> None:
        """Until its moment has come, or the run's end."""
        if fault.at_start:
            wait_until(fit.has_ended, fault.moment * self.start)
        else:
            wait_until(lambda: self._done() >= target or fit.has_ended(), RUN_SECONDS)
            wait_until(fit.has_ended, fault.jitter * 0.3)

    def _strike(self, fault: Fault, fit: FitProcess) -> str:
        """Whom it hit."""
        if fault.kind == "cut":
            self.ground.cut()
            return "host1"
        if fault.kind == "full":
            assert self.disk is not None
            self.disk.fill(int(fault.where * 3e6))
            return "disk"
        wait_until(lambda: self.ground.processes() or fit.has_ended(), RUN_SECONDS)  # there is none before its exec
        there = self.ground.processes()
        if not there:
            return "nobody"
        whom = fault.pick(sorted({process_role(words) for words in there.values()}))
        them = sorted(pid for pid, words in there.items() if process_role(words) == whom)
        hit = them[int(fault.where * len(them))]
        send_signal(hit, SIGNALS[fault.kind])
        if fault.kind == "stop" and whom == "fit":  # nobody is there to miss the command itself
            wait_until(fit.has_ended, STOPPED_SECONDS)
            send_signal(hit, SIGCONT)
            send_signal(fit.process.pid, SIGCONT)  # nsenter, which stops with what it runs
        return whom

    def _tidy(self) -> None:
        """What the next start needs: room, links, and nobody in its way."""
        if self.disk:
            self.disk.empty()
        self.ground.heal()
        self.ground.close()

    def _wrong(self, fault: Fault | None, whom: str, fit: FitProcess, status: int, before: int) -> Iterator[str]:
        """What should be true and is not."""
        found = newest_checkpoint(self.run)
        newest = found.checkpoint.step if found.checkpoint else 0
        if status not in allowed_statuses(fault, whom, self.ground.name):
            yield f"exit status {status}"
        if status == 0 and not newest == self._done() == STEPS:
            yield f"exit status 0, and it trained to step {self._done()} of {STEPS} and saved step {newest}"
        if newest < before:
            yield f"step {before} was saved, and step {newest} is the newest checkpoint that verifies"
        try:
            apart = {step: abs(loss - self.whole[step][0]) for step, (loss, _) in loss_curve(self.run).items()}
        except ValueError:
            yield "a line of metrics.jsonl is torn"
        else:
            off = [step for step, each in apart.items() if each > self.ground.apart]
            if off:
                yield f"step {off[0]} has another loss than undisturbed: by {apart[off[0]]:.1e}"
            if status == 0 and sorted(apart) != list(range(1, STEPS + 1)):
                yield "steps are missing in metrics.jsonl"
        if any(line.startswith("Traceback") for line in fit.lines):
            yield "it printed a traceback"
        if fault and fault.kind == "poison" and status == 1 and not any("samples" in row for row in metric_rows(self.run)):
            yield "the samples of the poisoned step are not written down"


def allowed_statuses(fault: Fault | None, whom: str, ground: str) -> set[int]:
    """Exit statuses that a fault may lead to; 0, which says that it trained, is held against what it left.

    Over hosts the ranks of a launcher that dies save and stop: 75. The command itself can be ended before it has begun, and an ssh
    before the files that it brings are there.
    """
    kind = fault.kind if fault else "none"
    if whom == "fit" and kind in ("kill", "term"):
        return {-9, 0} if kind == "kill" else {0, 75, 143, -15}
    if whom == "ssh" and kind == "term":
        return {0, 1, 75, 143}
    saves = {75} if ground == "hosts" and whom != "rank" else set[int]()
    # fmt: off
    return {
        "kill": {0, 1} | saves, "term": {0, 75, 143}, "stop": {0, 1} | saves, "truncated": {0}, "flipped": {0}, "full": {0, 1},
        "poison": {1}, "cut": {0, 1}, "none": {0},
    }[kind]
    # fmt: on


def result_table(outcomes: Sequence[FaultResult]) -> Iterator[str]:
    """A line a kind and whom it hit."""
    heads = f"{'number':>7}{'trained':>9}{'stopped':>9}{'failed':>8}{'median':>8}{'most':>7}  seconds to the last process"
    yield f"{'fault':<11}{'of':<10}{heads}"
    groups: dict[tuple[str, str], list[FaultResult]] = {}
    for each in outcomes:
        whom = each.target if each.fault.kind in SIGNALS else ""
        groups.setdefault((each.fault.kind, whom), []).append(each)
    for (kind, whom), them in sorted(groups.items()):
        counts = [sum(each.went_on for each in them), sum(each.status in (75, 143) for each in them)]
        counts.append(len(them) - sum(counts))
        times = [each.seconds for each in them if each.seconds is not None and each.fault.kind in ("kill", "term", "stop", "cut")]
        cells = (f"{median(times):.1f}", f"{max(times):.1f}") if times else ("", "")
        yield f"{kind:<11}{whom:<10}{len(them):>7}{counts[0]:>9}{counts[1]:>9}{counts[2]:>8}{cells[0]:>8}{cells[1]:>7}"


def main() -> None:
    given = dict(word.partition("=")[::2] for word in sys.argv[1:])
    number, over, seed = int(given.get("faults", 200)), int(given.get("hosts", 40)), int(given.get("seed", 1))
    folder = Path(given["folder"]).resolve() if "folder" in given else Path(mkdtemp(prefix="faults-"))
    root, none, began = os.geteuid() == 0, missing_tools(), time.monotonic()
    if none and over:
        print(f"no faults over hosts: {none}")
        over = 0
    outcomes: list[FaultResult] = []
    wrong = 0
    with ExitStack() as stack:
        grounds = list[tuple[LocalRuns, Disk | None, list[Fault]]]()
        if number > over:
            disk = Disk(folder / "local") if root else None
            stack.callback(disk.close if disk else bool)
            faults = draw_faults(number - over, seed, "local", without=() if root else ("full",))
            grounds.append((LocalRuns(folder / "local" / "runs"), disk, faults))
        if over:
            hosts = stack.enter_context(VirtualHosts(2, folder / "hosts"))
            grounds.append((HostRuns(folder / "over", hosts, given.get("runner", "pdsh")), None, draw_faults(over, seed, "hosts")))
        with suppress(KeyboardInterrupt):  # Ctrl-C: what came of those so far
            for ground, disk, faults in grounds:
                stack.callback(ground.close)
                campaign = Campaign(ground, disk, print)
                outcomes.extend(_apply_all(campaign, faults))
                wrong += campaign.violations
    print("\n".join(result_table(outcomes)))
    wrong += sum(bool(each.violations) for each in outcomes)
    said = f"after {wrong or 'none'} of them something was not as it must be"
    print(f"{len(outcomes)} faults (seed {seed}) in {time.monotonic() - began:,.0f} s: {said}; folder {folder}")
    sys.exit(bool(wrong))


def _apply_all(campaign: Campaign, faults: Sequence[Fault]) -> Iterator[FaultResult]:
    for fault in faults:
        outcome = campaign.apply(fault)
        when = "start" if fault.at_start else "step"
        took = "" if outcome.seconds is None else f" in {outcome.seconds:.1f} s"
        what = f"{campaign.ground.name} {fault.number:>3} {fault.kind} {outcome.target} ({when})"
        print(f"{what}: {outcome.status}{took}: {outcome.says[:150]}", flush=True)
        for line in outcome.violations:
            print(f"    BROKEN: {line} ({campaign.folder})", flush=True)
        yield outcome
    campaign.finish()


if __name__ == "__main__":
    main()
