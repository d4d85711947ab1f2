"""How often a run should save: interruptions that are to be expected, what a save takes, and what both leave of the time."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, expm1, sqrt

from ..spec.problem import Problem
from ..spec.run import Run
from ..spec.units import percent
from .result import Saving, Whole

ENOUGH = 1.0  # interruptions from which how often to save is worth a word
WORTH = 0.01  # share of the time from which another interval is
GRACE = 30.0  # seconds between SIGTERM and SIGKILL: Slurm's KillWait, torchrun's --shutdown-timeout
KILLERS = {"torchrun": ("torchrun", "give torchrun --shutdown-timeout"), "slurm": ("Slurm", "raise KillWait in slurm.conf")}


def saving(run: Run, whole: Whole, step: float | None) -> Saving:
    """What a plan says of saving; `step` is a step's seconds."""
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
    """Seconds of work between two saves of `save` seconds, where faults are `between` seconds apart in the mean.

    sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d, or M where d >= 2 M: Daly 2006, eq. 37 (doi:10.1016/j.future.2004.11.016);
    its first term is Young's.
    """
    if save >= 2 * between:
        return between
    part = save / (2 * between)
    return sqrt(2 * save * between) * (1 + sqrt(part) / 3 + part / 9) - save


def goodput(interval: float, save: float, between: float) -> float:
    """Share of the time that is kept work, saving every `interval` seconds of work and reading back in as long as a save takes.

    t / (M e^(R/M) (e^((t + d)/M) - 1)): the same paper, eq. 20. Time to notice a fault and to start again is not in it.
    """
    if interval + save > 500 * between:
        return 0.0
    return interval / (between * exp(save / between) * expm1((interval + save) / between))


def evaluation(run: Run, step: float) -> float:
    """Seconds of an evaluation where a step takes so many: its batches go forward alone, a third of a step's products."""
    return run.train.evaluate.batches * step / 3 if run.train.evaluate.every else 0.0


def stopping(run: Run, step: float | None, save: float | None) -> float:
    """Seconds at the most from the word to stop until all is saved, of what is known: the word is heard at a step's end, and one that
    comes just after finds the evaluation and the save there, the next step, and the last save before it. A step more is to spare."""
    return (2 * step + evaluation(run, step) if step else 0.0) + 2 * (save or 0.0)


def ill_saved(run: Run, whole: Whole, step: float | None, found: Saving) -> Iterator[Problem]:
    """That a run saves much too rarely or too often, or can't in the time that it is given when it is stopped."""
    often, save, stop = run.checkpoint.every, found.seconds, stopping(run, step, found.seconds)
    by = run.launch.runner if run.launch.name == "deepspeed" else run.launch.name
    if stop > GRACE and by in KILLERS:
        whose, mend = KILLERS[by]
        takes = f"to stop and save may take {stop:.0f} s ({_parts(run, step, save)})"
        says = f"{takes}, and {whose} kills what it has stopped after {GRACE:.0f} s: the checkpoint before is what stands"
        yield Problem(rule="saving", says=says, mend=f"{mend}, or write faster")
    if step is None or found.interruptions is None or found.interruptions < ENOUGH:
        return
    number = round(found.interruptions)
    expected = f"about {number:,} {'interruption is' if number == 1 else 'interruptions are'} to be expected"
    if found.every is None:
        if not often:
            says = f"checkpoint.every=0 saves at the end alone, and {expected}"
            yield Problem(rule="saving", says=says, mend="set checkpoint.every; cluster.storage (bytes/s) says how often is best")
        return
    assert save is not None
    assert found.goodput is not None
    ours = goodput((often or whole.steps) * step, save, found.mtbf)
    if ours < found.goodput - WORTH:
        how = f"checkpoint.every={often} keeps" if often else "saving at the end alone keeps"
        says = f"{expected}: {how} {percent(ours)} of the time, the best interval {percent(found.goodput)}"
        yield Problem(rule="saving", says=says, mend=f"set checkpoint.every={found.every}")


def _parts(run: Run, step: float | None, save: float | None) -> str:
    """What a stop waits for, in words."""
    each = evaluation(run, step) if step else 0.0
    known = ((step, "a step of"), (each, "an evaluation of"), (save, "a save of"))
    return ", ".join(f"{what} {seconds:.1f} s" for seconds, what in known if seconds)
