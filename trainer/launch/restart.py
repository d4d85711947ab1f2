"""The loop over a run's attempts: after a machine fault it starts again from the newest checkpoint."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..plan.plan_data import Plan
from ..rundir.checkpoints import checkpoints_folder, has_checkpoints, newest_saved
from ..rundir.files import write_launch_files
from ..spec.problem import Unreadable
from ..spec.run import Run
from ..system.stop_requests import StopRequests, collect_stop_requests
from .attempt import Show, run_attempt
from .goodput import GoodputMeter
from .hosts.hostfile import Host
from .next_attempt import HostedRun, HostFaults, TooFewHosts, next_attempt
from .rank.channel import STOPPED
from .supervisor.outcome import CONTINUES, FAILED, Outcome
from .suspect_checkpoints import SuspectCheckpoints
from .watchdog_times import load_watchdog, save_phase_times

FRUITLESS = 2  # attempts in a row without a step, after which the next one waits
FIRST_PAUSE, LONGEST_PAUSE = 30.0, 600.0  # seconds


def run_attempts(
    run: Run,
    plan: Plan,
    hosts: Sequence[Host],
    folder: Path,
    show: Show,
    live: Show,
    *,
    command: Sequence[str] = (),
    stop_requests: StopRequests | None = None,
) -> Outcome:
    """Run RUN_DIR's run, and again after each machine fault, at most launch.restarts times; return the last outcome.

    A run of which no attempt has reached a first step is not restarted: another attempt most likely would fail too, unless a device is at
    fault. A stop request ends it at any time, also between two attempts. `command` is what each rank runs, by default the trainer.
    `stop_requests` is the list of a `collect_stop_requests` around this call. `hosts` are those of the first attempt; a later one has
    others, or fewer, as it must.
    """
    command = command or [sys.executable, "-m", "distrain.trainer.loop.rank", str(folder / "run.json")]
    goodput, faults, suspects = GoodputMeter(folder=folder), HostFaults(), SuspectCheckpoints(folder=checkpoints_folder(folder))
    whole = last = HostedRun(run=run, plan=plan, hosts=tuple(hosts))
    before, fruitless = last.hosts, 0  # attempts in a row that have begun no step
    with collect_stop_requests(stop_requests) as requests:
        while True:
            outcome = _run_watched_attempt(last, folder, command, show, live, goodput, requests)
            outcome = replace(outcome, has_stepped=goodput.has_stepped)
            if outcome.is_refused:  # no rank did anything, so there is nothing to record
                return outcome
            faults.count(outcome)
            if line := suspects.set_aside(outcome, same_hosts=last.hosts == before):
                show(line)
            before = last.hosts
            why = _end_reason(run, outcome, goodput, suspects, folder)
            if why is not None:
                if why:
                    show(f"no restart: {why}")
                break
            fruitless = 0 if any(rank.step is not None for rank in outcome.ranks) else fruitless + 1
            _pause(fruitless, outcome, show, requests)
            try:
                following = next_attempt(whole, last, faults.hosts_to_avoid(outcome), requests)
                write_launch_files(following.run, following.plan, folder)
            except (TooFewHosts, OSError, Unreadable) as error:
                if not requests:
                    show(f"no restart: {error}")
                    break
            else:
                last = following
                goodput.note_restart(outcome, last.change)
                show(f"{outcome.says}\nrestart {goodput.restarts} of {run.launch.restarts}, from the newest checkpoint{last.change}")
            if requests:
                outcome = _outcome_between_attempts(run, outcome, folder, requests)
                break
        if run.launch.restarts:
            show(goodput.write_summary())
    if outcome.status > 128:
        outcome = replace(outcome, says=f"{outcome.says}; {_what_remains(run, folder)}")
    if outcome.status == STOPPED and run.checkpoint.resume == "never" and _newest_step(folder) is not None:
        outcome = replace(outcome, says=outcome.says.replace(CONTINUES, "checkpoint.resume=auto goes on from it"))
    return outcome


def _run_watched_attempt(
    hosted: HostedRun,
    folder: Path,
    command: Sequence[str],
    show: Show,
    live: Show,
    goodput: GoodputMeter,
    requests: StopRequests,
) -> Outcome:
    """Run one attempt, measure it, and save the phase times that the watchdog learned."""
    run = hosted.run
    resumed = run.checkpoint.resume != "never" and has_checkpoints(folder)
    watchdog = load_watchdog(run, folder)
    outcome = run_attempt(
        run,
        hosted.plan,
        hosted.hosts,
        folder,
        command,
        show=show,
        live=live,
        watchdog=watchdog,
        on_first_step=goodput.note_first_step,
        stop_requests=requests,
    )
    goodput.note_end(outcome)
    if not outcome.is_refused:
        save_phase_times(run, folder, watchdog, resumed=resumed)
    return outcome


def _end_reason(run: Run, outcome: Outcome, goodput: GoodputMeter, suspects: SuspectCheckpoints, folder: Path) -> str | None:
    """Return why the run ends here, as `no_restart_reason` does, also where no checkpoint is left that can be trusted."""
    why = no_restart_reason(run, outcome, restarts=goodput.restarts, has_stepped=goodput.has_stepped, saved_step=_newest_step(folder))
    if why is None and suspects.are_all:
        return "the checkpoints may hold wrong weights: remove them to start from step 0, or the same command goes on from the newest"
    return why


def pause_seconds(fruitless: int) -> float:
    """Return how long to wait before another attempt after so many in a row that have begun no step: a network or a file system that
    is gone for minutes would use up all restarts."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (fruitless - FRUITLESS)) if fruitless >= FRUITLESS else 0.0


def _pause(fruitless: int, outcome: Outcome, show: Show, requests: StopRequests) -> None:
    """Wait before another attempt, until a stop request."""
    if seconds := pause_seconds(fruitless):
        show(outcome.says)
        show(f"{fruitless} attempts in a row have begun no step: the next one follows in {seconds:.0f} s")
        until = time.monotonic() + seconds
        while not requests and time.monotonic() < until:
            time.sleep(0.2)


def is_machine_failure(outcome: Outcome) -> bool:
    """Whether the attempt failed by a machine fault, with no stop requested."""
    cause = outcome.root_cause
    return (
        outcome.status == FAILED and not outcome.stop_requested and (bool(outcome.hosts) or (cause is not None and cause.is_machine_fault))
    )


def no_restart_reason(run: Run, outcome: Outcome, *, restarts: int, has_stepped: bool, saved_step: int | None) -> str | None:
    """Return why a run is not restarted after `outcome`, and what to do; "" where the user needs no reason, None where it is restarted.

    `restarts` is how many there were; `has_stepped`, whether an attempt has reached a first step; `saved_step`, the newest checkpoint's.
    """
    most, onward = run.launch.restarts, "from the beginning" if saved_step is None else f"from step {saved_step}"
    if outcome.status != FAILED or outcome.stop_requested:
        return ""
    is_device = outcome.root_cause is not None and outcome.root_cause.fault != ""  # which the check before the first step found
    if not ((has_stepped or is_device) and is_machine_failure(outcome)):
        if not most:
            return ""
        why = "the program failed, not the machine" if has_stepped else "no attempt reached its first step"
        return f"{why}, and most likely would again: fix the error above, and the same command goes on {onward}"
    if not most:
        return f"launch.restarts=0; launch.restarts=3 would have restarted it {onward}, where the same command goes on"
    if restarts >= most:
        return f"launch.restarts={most} is used up; the same command goes on {onward}"
    return None


def _newest_step(folder: Path) -> int | None:
    """The step of RUN_DIR's newest checkpoint; None where there is none."""
    saved, _ = newest_saved(checkpoints_folder(folder))
    return saved.step if saved else None


def _what_remains(run: Run, folder: Path) -> str:
    """Return which checkpoint a run that was stopped without a last one can resume from, and how."""
    step = _newest_step(folder)
    if step is None:
        return "there is no checkpoint: the same command starts from the beginning"
    how = "the same command" if run.checkpoint.resume != "never" else "checkpoint.resume=auto"
    return f"the newest whole checkpoint is of step {step}: {how} goes on from there"


def _outcome_between_attempts(run: Run, outcome: Outcome, folder: Path, requests: StopRequests) -> Outcome:
    """Return the outcome of a run that was asked to stop after an attempt had failed and before the next one began."""
    number = requests[-1][0]
    says = f"{outcome.says}; {signal.Signals(number).name} came before the restart"
    if _newest_step(folder) is None:
        return replace(outcome, status=128 + number, says=says, stop_requested=True)
    return replace(outcome, status=STOPPED, says=f"{says}; {_what_remains(run, folder)}", stop_requested=True)
