"""Injects faults into real runs, drawn from a seed, and checks invariants that must hold after every fault.

Run `python -m distrain.scripts.faults [faults=200] [hosts=40] [seed=1] [runner=pdsh] [folder=DIR]`. `hosts` of the `faults` go to runs
over two hosts, which are namespaces of this machine (that needs root, openssh-server, pdsh or openmpi-bin, iproute2 and util-linux); a
full disk is a small tmpfs (root). The runs are `distrain fit` of a small GPT on two ranks, started again until it has trained:

    kill, term, stop      SIGKILL, SIGTERM or SIGSTOP to any process of the run, at any moment
    truncated, flipped    a file of the newest checkpoint is cut off at any byte, or one of its bits flipped
    full                  no or almost no space is left on the disk
    nan                   a gradient of one rank becomes NaN
    cut                   the link of a host goes down

The invariants: no process of the run is left (within a minute; the seconds are reported); it exits 0 only if it has trained and its last
checkpoint verifies, else with a status that the fault allows; the newest checkpoint that verifies is no older than before; each
step has the loss of the uninterrupted run; and the run said what was wrong without a traceback.
"""

from __future__ import annotations

import os
import shutil
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
from .faults_runs import (
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
from .random_faults import FILE_DAMAGES, SIGNALS, Fault, draw_faults
from .show_help import show_help
from .virtual_hosts import VirtualHosts, missing_tools

EXIT_SECONDS = 60.0  # for all processes to end
RUN_SECONDS = 180.0  # for a run with a fault to end
STOPPED_SECONDS = 3.0  # for which the command itself stays stopped
CHECKPOINT_TRIES = 3  # to train a checkpoint that a fault damages
FAULTS_PER_RUN = 6  # then the run is left to finish


@dataclass(frozen=True, kw_only=True)
class FaultResult:
    """The result of a fault; `violations` are the invariants that did not hold."""

    fault: Fault
    target: str  # the process, file or device that it hit
    status: int
    seconds: float | None  # from the fault to the end of the last process; None where the run trained on
    trained: bool  # to its end, in spite of the fault
    violations: tuple[str, ...]
    says: str  # the last line that it printed


class Campaign:
    """Applies faults to runs of one kind (`runs`: local, or over hosts), one after another."""

    def __init__(self, runs: LocalRuns, disk: Disk | None, show: Callable[[str], None]) -> None:
        self.runs, self.disk, self.show = runs, disk, show
        self.number = 0  # of the present run
        self.violations = 0  # runs that violated an invariant when left to finish
        self.folder = Path()
        self.applied = 0  # faults in this run
        self.is_checked = False  # this run has trained, in spite of its last fault, and holds the invariants
        self._begin_run()
        fit = runs.start(self.folder)
        wait_until(lambda: self._last_step() > 0 or fit.has_ended(), RUN_SECONDS)
        self.start_seconds = time.monotonic() - fit.began  # to the first step
        wait_until(fit.has_ended, RUN_SECONDS)
        self.undisturbed = loss_curve(self.folder / "run")
        if fit.process.returncode or len(self.undisturbed) != runs.steps:
            sys.exit(f"the run does not train even without a fault: {fit.lines[-1] if fit.lines else ''} ({fit.log})")
        self._begin_run()

    def apply(self, fault: Fault) -> FaultResult:
        """Start the run, apply the fault, wait for its end and check the invariants."""
        if self._last_step() >= self.runs.steps or self.applied >= FAULTS_PER_RUN:
            if not self.is_checked:
                self.finish()
            self._begin_run()
        self.applied += 1
        if fault.kind in FILE_DAMAGES and not self._train_to_checkpoint(fault):
            self._tidy()
            says = f"no checkpoint was saved in {CHECKPOINT_TRIES} tries"
            return FaultResult(fault=fault, target="none", status=1, seconds=None, trained=False, violations=(says,), says=says)
        before, nan_at = self._newest_step(), ""
        target: str = fault.kind
        if fault.kind in FILE_DAMAGES:
            target = self._damage(fault)
            before = self._newest_step()
        at_step = self._last_step() + 1 + int(fault.moment * (self.runs.steps - self._last_step() - 1))
        if fault.kind == "nan":
            rank = int(fault.whom * 2)
            target, nan_at = f"rank {rank}", f"{min(at_step, self.runs.steps - 1)} {rank}"  # which counts from 0
        background = f"checkpoint.background={'true' if fault.number % 2 else 'false'}"
        fit = self.runs.start(self.folder, f"launch.restarts={fault.restarts}", background, nan_at=nan_at)
        at = fit.began
        if fault.kind in SIGNALS or fault.kind in ("full", "cut"):
            self._wait_for_moment(fault, fit, at_step)
            before, at = max(before, self._newest_step()), time.monotonic()
            target = self._inject(fault, fit) or target
        violations = [] if wait_until(fit.has_ended, RUN_SECONDS) else [f"it did not end within {RUN_SECONDS:.0f} s"]
        if not wait_until(lambda: not self.runs.processes(), EXIT_SECONDS):
            left = "; ".join(sorted({process_role(words) for words in self.runs.processes().values()}))
            violations.append(f"processes are left after {EXIT_SECONDS:.0f} s: {left}")
        seconds = time.monotonic() - at
        self._tidy()
        if not fit.has_ended():
            fit.process.kill()
        status = fit.process.wait()
        violations.extend(self._violations(fault, target, fit, status, before))
        says = fit.lines[-1] if fit.lines else ""
        trained = status == 0
        self.is_checked = trained and not violations
        return FaultResult(
            fault=fault,
            target=target,
            status=status,
            seconds=None if trained else seconds,
            trained=trained,
            violations=tuple(violations),
            says=says,
        )

    def finish(self) -> None:
        """Let the run train to its end without further faults."""
        fit = self.runs.start(self.folder)
        status = fit.process.returncode if wait_until(fit.has_ended, RUN_SECONDS) else -1
        end_child(fit.process)
        if violations := list(self._violations(None, "", fit, status, 0)):
            self.violations += 1
            self.show(f"    VIOLATED when left to finish: {'; '.join(violations)} ({self.folder})")

    @property
    def run(self) -> Path:
        """RUN_DIR."""
        return self.folder / "run"

    def _begin_run(self) -> None:
        self.number, self.applied = self.number + 1, 0
        self.folder = self.runs.folder / f"{self.number}"
        self.folder.mkdir()

    def _last_step(self) -> int:
        return max(loss_curve(self.run), default=0)

    def _newest_step(self) -> int:
        checkpoint = newest_checkpoint(self.run).checkpoint
        return checkpoint.step if checkpoint else 0

    def _train_to_checkpoint(self, fault: Fault) -> bool:
        """Train until there is a checkpoint to damage; return whether there is. A busy machine may need a second try."""
        for _ in range(CHECKPOINT_TRIES):
            if newest_checkpoint(self.run).checkpoint is not None:
                break
            self._train_and_stop(fault)
        return newest_checkpoint(self.run).checkpoint is not None

    def _train_and_stop(self, fault: Fault) -> None:
        if self.run.exists():  # of a try that saved nothing, whose logged steps would end the wait at once
            shutil.rmtree(self.run)
        fit = self.runs.start(self.folder)
        wait_until(lambda: self._last_step() > (1 + 2 * fault.moment) * self.runs.steps / 6 or fit.has_ended(), RUN_SECONDS)
        send_signal(fit.process.pid, SIGNALS["term"])
        wait_until(fit.has_ended, RUN_SECONDS)
        end_child(fit.process)

    def _damage(self, fault: Fault) -> str:
        """Cut off a file of the newest checkpoint, or flip one of its bits; return the file and the place."""
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

    def _wait_for_moment(self, fault: Fault, fit: FitProcess, at_step: int) -> None:
        """Wait until the fault's moment, or the run's end."""
        if fault.at_start:
            wait_until(fit.has_ended, fault.moment * self.start_seconds)
        else:
            wait_until(lambda: self._last_step() >= at_step or fit.has_ended(), RUN_SECONDS)
            wait_until(fit.has_ended, fault.jitter * 0.3)

    def _inject(self, fault: Fault, fit: FitProcess) -> str:
        """Apply a fault from outside; return what it hit."""
        if fault.kind == "cut":
            self.runs.cut_link()
            return "host1"
        if fault.kind == "full":
            assert self.disk is not None
            self.disk.fill(int(fault.where * 3e6))
            return "disk"
        wait_until(lambda: self.runs.processes() or fit.has_ended(), RUN_SECONDS)  # none before its exec
        processes = self.runs.processes()
        if not processes:
            return "no process"
        target = fault.pick(sorted({process_role(command) for command in processes.values()}))
        pids = sorted(pid for pid, command in processes.items() if process_role(command) == target)
        hit = pids[int(fault.where * len(pids))]
        send_signal(hit, SIGNALS[fault.kind])
        if fault.kind == "stop" and target == "fit":  # nothing watches the command itself
            wait_until(fit.has_ended, STOPPED_SECONDS)
            send_signal(hit, SIGCONT)
            send_signal(fit.process.pid, SIGCONT)  # nsenter, which stops with what it runs
        return target

    def _tidy(self) -> None:
        """Restore the disk and the links, and kill what is left, for the next start."""
        if self.disk:
            self.disk.empty()
        self.runs.restore_link()
        self.runs.close()

    def _violations(self, fault: Fault | None, target: str, fit: FitProcess, status: int, before: int) -> Iterator[str]:
        """Yield the invariants that do not hold."""
        steps = self.runs.steps
        found = newest_checkpoint(self.run)
        newest = found.checkpoint.step if found.checkpoint else 0
        if status not in allowed_statuses(fault, target, self.runs.name):
            yield f"exit status {status}"
        if status == 0 and not newest == self._last_step() == steps:
            yield f"exit status 0, and it trained to step {self._last_step()} of {steps} and saved step {newest}"
        if newest < before:
            yield f"step {before} was saved, and step {newest} is the newest checkpoint that verifies"
        try:
            deviations = {step: abs(loss - self.undisturbed[step][0]) for step, (loss, _) in loss_curve(self.run).items()}
        except ValueError:
            yield "a line of metrics.jsonl is incomplete"
        else:
            off = [step for step, each in deviations.items() if each > self.runs.tolerance]
            if off:
                yield f"step {off[0]} has a different loss than the undisturbed run, by {deviations[off[0]]:.1e}"
            if status == 0 and sorted(deviations) != list(range(1, steps + 1)):
                yield "steps are missing in metrics.jsonl"
        if any(line.startswith("Traceback") for line in fit.lines):
            yield "it printed a traceback"
        if fault and fault.kind == "nan" and status == 1 and not any("samples" in row for row in metric_rows(self.run)):
            yield "the samples of the step with a NaN are not recorded"


def allowed_statuses(fault: Fault | None, target: str, runs: str) -> set[int]:
    """Return the exit statuses that a fault may lead to; with 0 the run must have trained, which is checked apart.

    Over hosts, the ranks save and stop when their launcher dies: 75. The command itself can be ended before it handles signals, and an
    ssh before it has uploaded its files.
    """
    kind = fault.kind if fault else "none"
    if target == "fit" and kind in ("kill", "term"):
        return {-9, 0} if kind == "kill" else {0, 75, 143, -15}
    if target == "ssh" and kind == "term":
        return {0, 1, 75, 143}
    saves = {75} if runs == "hosts" and target != "rank" else set[int]()
    # fmt: off
    return {
        "kill": {0, 1} | saves, "term": {0, 75, 143}, "stop": {0, 1} | saves, "truncated": {0}, "flipped": {0}, "full": {0, 1},
        "nan": {1}, "cut": {0, 1}, "none": {0},
    }[kind]
    # fmt: on


def result_table(results: Sequence[FaultResult]) -> Iterator[str]:
    """Yield a line for each kind of fault and process that it hit."""
    heads = f"{'number':>7}{'trained':>9}{'stopped':>9}{'failed':>8}{'median':>8}{'max':>7}  seconds until the last process ended"
    yield f"{'fault':<11}{'of':<10}{heads}"
    groups: dict[tuple[str, str], list[FaultResult]] = {}
    for each in results:
        target = each.target if each.fault.kind in SIGNALS else ""
        groups.setdefault((each.fault.kind, target), []).append(each)
    for (kind, target), group in sorted(groups.items()):
        counts = [sum(each.trained for each in group), sum(each.status in (75, 143) for each in group)]
        counts.append(len(group) - sum(counts))
        times = [each.seconds for each in group if each.seconds is not None and each.fault.kind in ("kill", "term", "stop", "cut")]
        cells = (f"{median(times):.1f}", f"{max(times):.1f}") if times else ("", "")
        yield f"{kind:<11}{target:<10}{len(group):>7}{counts[0]:>9}{counts[1]:>9}{counts[2]:>8}{cells[0]:>8}{cells[1]:>7}"


def main() -> None:
    given = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    number, over, seed = int(given.get("faults", 200)), int(given.get("hosts", 40)), int(given.get("seed", 1))
    folder = Path(given["folder"]).resolve() if "folder" in given else Path(mkdtemp(prefix="faults-"))
    root, missing, began = os.geteuid() == 0, missing_tools(), time.monotonic()
    if missing and over:
        print(f"no faults over hosts: {missing}")
        over = 0
    results: list[FaultResult] = []
    violations = 0
    with ExitStack() as stack:
        plans = list[tuple[LocalRuns, Disk | None, list[Fault]]]()
        if number > over:
            disk = Disk(folder / "local") if root else None
            stack.callback(disk.close if disk else bool)
            faults = draw_faults(number - over, seed, "local", without=() if root else ("full",))
            plans.append((LocalRuns(folder / "local" / "runs"), disk, faults))
        if over:
            hosts = stack.enter_context(VirtualHosts(2, folder / "hosts"))
            plans.append((HostRuns(folder / "over", hosts, given.get("runner", "pdsh")), None, draw_faults(over, seed, "hosts")))
        with suppress(KeyboardInterrupt):  # at Ctrl-C, report the faults so far
            for runs, disk, faults in plans:
                stack.callback(runs.close)
                campaign = Campaign(runs, disk, print)
                results.extend(_apply_all(campaign, faults))
                violations += campaign.violations
    print("\n".join(result_table(results)))
    violations += sum(bool(each.violations) for each in results)
    says = f"{violations} of them violated an invariant" if violations else "no invariant was violated"
    print(f"{len(results)} faults (seed {seed}) in {time.monotonic() - began:,.0f} s: {says}; folder {folder}")
    sys.exit(bool(violations))


def _apply_all(campaign: Campaign, faults: Sequence[Fault]) -> Iterator[FaultResult]:
    for fault in faults:
        result = campaign.apply(fault)
        when = "start" if fault.at_start else "step"
        took = "" if result.seconds is None else f" in {result.seconds:.1f} s"
        what = f"{campaign.runs.name} {fault.number:>3} {fault.kind} {result.target} ({when})"
        print(f"{what}: {result.status}{took}: {result.says[:150]}", flush=True)
        for line in result.violations:
            print(f"    VIOLATED: {line} ({campaign.folder})", flush=True)
        yield result
    campaign.finish()


if __name__ == "__main__":
    show_help(__doc__)
    main()
