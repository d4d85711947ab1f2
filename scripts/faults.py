"""Injects faults into real runs, drawn from a seed, and checks invariants that must hold after every fault.

Run `python -m distrain.scripts.faults [faults=200] [hosts=40] [seed=1] [steps=120] [runner=pdsh] [folder=DIR]`. `hosts` of the `faults`
go to runs over two hosts, which are namespaces of this machine (that needs root, openssh-server, pdsh or openmpi-bin, iproute2 and
util-linux); a full disk is a small tmpfs (root). The runs are `distrain fit` of a small GPT on two ranks, started again until it has
trained:

    kill, term, stop      SIGKILL, SIGTERM or SIGSTOP to any process of the run, at any moment
    truncated, flipped    a file of the newest checkpoint is cut off at any byte, or one of its bits flipped
    full                  no or almost no space is left on the disk
    nan                   a gradient of one rank becomes NaN
    slow                  from some step on each step of one rank takes 50 ms longer
    deleted               the folder of checkpoints is removed, at any moment
    cut                   the link of a host goes down

The invariants: no process of the run is left (within a minute or a start; the seconds are reported); it exits 0 only if it has trained
and its last checkpoint verifies, else with a status that the fault allows; the newest checkpoint that verifies is no older than before;
each step has the loss of the uninterrupted run; and the run said what was wrong without a traceback.

How long to wait follows from the machine: launch.patience and all deadlines are multiples of how long the run without a fault, and the
starts since, took.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from signal import SIGCONT
from tempfile import mkdtemp

from ..trainer.rundir.checkpoints import checkpoints_folder
from ..trainer.rundir.files import logged_bytes
from ..trainer.system.child_process import end_child
from .fault_results import FaultResult, allowed_statuses, result_table
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
from .random_faults import FILE_DAMAGES, SIGNALS, Fault, draw_faults
from .show_help import show_help
from .virtual_hosts import VirtualHosts, missing_tools

UNDISTURBED_SECONDS = 3600.0  # for the first run to end, whatever the machine does
EXIT_SECONDS = 60.0  # for all processes to end, at least; else as long as a start
RUN_SECONDS = 180.0  # for a run with a fault to end, at least
RUN_FACTOR = 10  # else times the seconds of the run without a fault
PATIENCE = 5.0  # launch.patience, at least
PATIENCE_SHARE = 0.4  # else of the seconds of a start, which may take ten times the patience
RECENT_STARTS = 4
STOPPED_SECONDS = 3.0  # for which the command itself stays stopped
CHECKPOINT_TRIES = 3  # to train a checkpoint that a fault damages
FAULTS_PER_RUN = 6  # then the run is left to finish
LAST_STEPS = 10  # of a run, in which its checkpoints are not removed: the last save would not come again
UNHURRIED = f"launch.patience={UNDISTURBED_SECONDS:.0f}"  # of runs without a fault


class Campaign:
    """Applies faults to runs of one kind (`runs`: local, or over hosts), one after another."""

    def __init__(self, runs: LocalRuns, disk: Disk | None, show: Callable[[str], None]) -> None:
        self.runs, self.disk, self.show = runs, disk, show
        self.number = 0  # of the present run
        self.violations = 0  # runs that violated an invariant when left to finish
        self.folder = Path()
        self.applied = 0  # faults in this run
        self.is_checked = False  # this run has trained, in spite of its last fault, and holds the invariants
        self.starts: deque[float] = deque(maxlen=RECENT_STARTS)  # seconds to the first step
        self._begin_run()
        fit = runs.start(self.folder, UNHURRIED)
        self._note_start(fit, UNDISTURBED_SECONDS)
        wait_until(fit.has_ended, UNDISTURBED_SECONDS)
        self.run_seconds = max(RUN_SECONDS, RUN_FACTOR * (time.monotonic() - fit.began))
        self.undisturbed = loss_curve(self.folder / "run")
        if not fit.has_ended() or fit.process.returncode or len(self.undisturbed) != runs.steps:
            end_child(fit.process)
            sys.exit(f"the run does not train even without a fault: {fit.lines[-1] if fit.lines else ''} ({fit.log})")
        show(f"{runs.name}: a start takes {max(self.starts):.1f} s; a run with a fault may take {self.run_seconds:.0f} s")
        self._begin_run()

    @property
    def start_seconds(self) -> float:
        """The seconds of a start, the longest of the last ones."""
        return max(self.starts)

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
        before, in_rank = self._newest_step(), ""
        target: str = fault.kind
        if fault.kind in FILE_DAMAGES:
            target = self._damage(fault)
            before = self._newest_step()
        at_step = self._last_step() + 1 + int(fault.moment * (self.runs.steps - self._last_step() - 1))
        if fault.kind == "deleted":
            at_step = min(at_step, self.runs.steps // 2)
        if fault.kind in ("nan", "slow"):
            rank = int(fault.whom * 2)
            target, in_rank = f"rank {rank}", f"{fault.kind} {min(at_step, self.runs.steps - 1)} {rank}"  # which counts from 0
        background = f"checkpoint.background={'true' if fault.number % 2 else 'false'}"
        patience = f"launch.patience={max(PATIENCE, PATIENCE_SHARE * self.start_seconds):.0f}"
        fit = self.runs.start(self.folder, f"launch.restarts={fault.restarts}", background, patience, in_rank=in_rank)
        at = fit.began
        if fault.kind in SIGNALS or fault.kind in ("full", "cut", "deleted"):
            self._wait_for_moment(fault, fit, at_step)
            before, at = max(before, self._newest_step()), time.monotonic()
            target = self._inject(fault, fit) or target
        if fault.kind == "deleted":
            before = 0
        violations = [] if wait_until(fit.has_ended, self.run_seconds) else [f"it did not end within {self.run_seconds:.0f} s"]
        exit_seconds = max(EXIT_SECONDS, self.start_seconds)
        if not wait_until(lambda: not self.runs.processes(), exit_seconds):
            left = "; ".join(sorted({process_role(words) for words in self.runs.processes().values()}))
            violations.append(f"processes are left after {exit_seconds:.0f} s: {left}")
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
        fit = self.runs.start(self.folder, UNHURRIED)
        status = fit.process.returncode if wait_until(fit.has_ended, self.run_seconds) else -1
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

    def _note_start(self, fit: FitProcess, seconds: float) -> None:
        """Wait for the first step of a run that was started, and note how long it took to come there, unless it has ended before."""
        before = self._logged_bytes()
        if wait_until(lambda: self._logged_bytes() > before or fit.has_ended(), seconds) and self._logged_bytes() > before:
            self.starts.append(time.monotonic() - fit.began)

    def _logged_bytes(self) -> int:
        return logged_bytes(self.run)

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
        fit = self.runs.start(self.folder, UNHURRIED)
        self._note_start(fit, self.run_seconds)
        wait_until(lambda: self._last_step() > (1 + 2 * fault.moment) * self.runs.steps / 6 or fit.has_ended(), self.run_seconds)
        send_signal(fit.process.pid, SIGNALS["term"])
        wait_until(fit.has_ended, self.run_seconds)
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
            self._note_start(fit, self.run_seconds)
            wait_until(lambda: self._last_step() >= at_step or fit.has_ended(), self.run_seconds)
            wait_until(fit.has_ended, fault.jitter * 0.3)

    def _inject(self, fault: Fault, fit: FitProcess) -> str:
        """Apply a fault from outside; return what it hit."""
        if fault.kind == "deleted":
            if fit.has_ended() or self._last_step() > self.runs.steps - LAST_STEPS:  # nothing is saved after the last save
                return "nothing"
            shutil.rmtree(checkpoints_folder(self.run), ignore_errors=True)
            return "checkpoints"
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


def main() -> None:
    given = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    number, over, seed = int(given.get("faults", 200)), int(given.get("hosts", 40)), int(given.get("seed", 1))
    steps = int(given.get("steps", STEPS))
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
            plans.append((LocalRuns(folder / "local" / "runs", steps), disk, faults))
        if over:
            hosts = stack.enter_context(VirtualHosts(2, folder / "hosts"))
            plans.append((HostRuns(folder / "over", hosts, given.get("runner", "pdsh"), steps), None, draw_faults(over, seed, "hosts")))
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
