"""The best checkpoint interval (Daly 2006) from the time between faults and the time of a save, and the goodput at it."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, expm1, sqrt

from ..spec.key_units import percent_text
from ..spec.problem import Problem
from ..spec.run import Run
from .result import Saving, WholeRun

ENOUGH = 1.0  # expected interruptions from which the interval is judged
WORTH = 0.01  # share of the time that another interval must save to be suggested
SIGKILL_DELAY = 30.0  # seconds between SIGTERM and SIGKILL: Slurm's KillWait, torchrun's --shutdown-timeout
KILLERS = {"torchrun": ("torchrun", "give torchrun --shutdown-timeout"), "slurm": ("Slurm", "raise KillWait in slurm.conf")}


def plan_saving(run: Run, whole: WholeRun, step: float | None) -> Saving:
    """Return the plan's figures of saving; `step` is the seconds of a step."""
    cluster = run.cluster
    between = cluster.mtbf / (cluster.nodes * cluster.gpus)
    save = whole.checkpoint_bytes / cluster.storage if cluster.storage else None
    best = best_interval(save, between) if save is not None else None
    every = max(1, round(best / step)) if best is not None and step else None
    return Saving(
        mtbf=between,
        interruptions=whole.seconds / between if whole.seconds is not None else None,
        seconds=save,
        interval=best,
        every=every,
        goodput=goodput(every * step, save, between) if every and step and save is not None else None,
    )


def best_interval(save: float, between: float) -> float:
    """Return the best seconds of work between two saves of `save` seconds, where faults are `between` seconds apart on average.

    sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d, or M where d >= 2 M: Daly 2006, eq. 37 (doi:10.1016/j.future.2004.11.016);
    its first term is Young's.
    """
    if save >= 2 * between:
        return between
    part = save / (2 * between)
    return sqrt(2 * save * between) * (1 + sqrt(part) / 3 + part / 9) - save


def goodput(interval: float, save: float, between: float) -> float:
    """Return the share of the time that is kept work, with a save every `interval` seconds of work and a load as long as a save.

    t / (M e^(R/M) (e^((t + d)/M) - 1)): the same paper, eq. 20. It leaves out the time to notice a fault and to restart.
    """
    if interval + save > 500 * between:
        return 0.0
    return interval / (between * exp(save / between) * expm1((interval + save) / between))


def evaluation_seconds(run: Run, step: float) -> float:
    """Return the seconds of an evaluation, given those of a step: its batches run forward only, a third of a step's products."""
    return run.train.evaluate.batches * step / 3 if run.train.evaluate.every else 0.0


def stop_seconds(run: Run, step: float | None, save: float | None) -> float:
    """Return the most seconds from a stop request until all is saved, of the times that are known.

    A request is read at the end of a step. One that arrives just after waits for that step's evaluation and save, the next step, and the
    final save; one more step is added as a margin.
    """
    return (2 * step + evaluation_seconds(run, step) if step else 0.0) + 2 * (save or 0.0)


def save_warnings(run: Run, whole: WholeRun, step: float | None, found: Saving) -> Iterator[Problem]:
    """Yield that a run saves much too rarely or too often, or can't save in the time that its launcher gives it to stop."""
    often, save, stop = run.checkpoint.every, found.seconds, stop_seconds(run, step, found.seconds)
    by = run.launch.runner if run.launch.name == "deepspeed" else run.launch.name
    if stop > SIGKILL_DELAY and by in KILLERS:
        whose, mend = KILLERS[by]
        takes = f"stopping and saving may take {stop:.0f} s ({_parts(run, step, save)})"
        says = f"{takes}, but {whose} kills a stopped run after {SIGKILL_DELAY:.0f} s, which then resumes from an earlier checkpoint"
        yield Problem(rule="saving", says=says, mend=f"{mend}, or write faster")
    if step is None or found.interruptions is None or found.interruptions < ENOUGH:
        return
    number = round(found.interruptions)
    expected = f"about {number:,} {'interruption is' if number == 1 else 'interruptions are'} expected"
    if found.every is None:
        if not often:
            says = f"checkpoint.every=0 saves {_when_without_interval(run)}, and {expected}"
            yield Problem(rule="saving", says=says, mend="set checkpoint.every; cluster.storage (bytes/s) tells the best interval")
        return
    assert save is not None
    assert found.goodput is not None
    ours = goodput((often or whole.steps) * step, save, found.mtbf)
    if ours < found.goodput - WORTH:
        how = f"checkpoint.every={often} keeps" if often else f"saving {_when_without_interval(run)} keeps"
        says = f"{expected}: {how} {percent_text(ours)} of the time, the best interval {percent_text(found.goodput)}"
        yield Problem(rule="saving", says=says, mend=f"set checkpoint.every={found.every}")


def _when_without_interval(run: Run) -> str:
    """Return when a run saves that has no interval, in words."""
    return "only at the end" if run.checkpoint.final else "never"


def _parts(run: Run, step: float | None, save: float | None) -> str:
    """Return what a stop waits for, in words."""
    each = evaluation_seconds(run, step) if step else 0.0
    known = ((step, "a step of"), (each, "an evaluation of"), (save, "a save of"))
    return ", ".join(f"{what} {seconds:.1f} s" for seconds, what in known if seconds)
