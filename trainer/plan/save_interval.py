"""The best checkpoint interval (Daly 2006) from the time between faults and the time of a save, and the goodput at it."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, expm1, sqrt
from typing import NamedTuple

from ..spec.keys.units import percent_text
from ..spec.problem import Problem
from ..spec.run import Run
from .plan_data import Saving, WholeRun

ENOUGH = 0.1  # expected interruptions from which the interval is judged
WORTH = 0.01  # share of the time that another interval must save to be suggested
SIGKILL_DELAY = 30.0  # seconds between SIGTERM and SIGKILL: Slurm's KillWait, torchrun's --shutdown-timeout
# Bytes/s assumed for a save where cluster.storage is not set: our own, low for a parallel file system, near one disk or network share.
ASSUMED_STORAGE = 1e9
KILLERS = {"torchrun": ("torchrun", "give torchrun --shutdown-timeout"), "slurm": ("Slurm", "raise KillWait in slurm.conf")}
_ASSUMPTION = f" at an assumed {ASSUMED_STORAGE / 1e9:.0f} GB/s, as cluster.storage is not set"


def plan_saving(run: Run, whole: WholeRun, step: float | None, copied: int, check: float) -> Saving:
    """Return the plan's figures of saving; `step` is the seconds of a step, `copied` the bytes that a rank saves of a checkpoint, `check`
    the seconds of the forward whose loss a checkpoint records.

    In the background training waits for that, and for the copy to the host; the next save begins once the last one has ended.
    """
    cluster = run.cluster
    between = cluster.mtbf / (cluster.nodes * cluster.gpus)
    save = check + whole.checkpoint_bytes / cluster.storage if cluster.storage else None
    copy = copy_seconds(run, copied)
    background = check + copy if copy is not None else None
    pause = background if run.checkpoint.background else save
    best = _best_saving(step, save, pause, between)
    other = _best_saving(step, save, background, between) if not run.checkpoint.background else None
    return Saving(
        mtbf=between,
        interruptions=whole.seconds / between if whole.seconds is not None else None,
        seconds=save,
        pause=pause,
        interval=best.interval if best else None,
        every=best.every if best else None,
        goodput=best.goodput if best else None,
        background_goodput=other.goodput if other else None,
        missing="" if best else missing_rate(run),
    )


class BestSaving(NamedTuple):
    """The best interval between two saves, in seconds and in steps (None: a step's seconds are not known), and the goodput with it."""

    interval: float
    every: int | None
    goodput: float | None


def _best_saving(step: float | None, save: float | None, pause: float | None, between: float) -> BestSaving | None:
    """Return the best interval between saves that take `save` seconds, of which training waits for `pause`; None: one is not known."""
    if save is None or pause is None:
        return None
    best = max(best_interval(pause, between), save - pause)
    if not step:
        return BestSaving(best, None, None)
    every = max(1, round(best / step))
    return BestSaving(best, every, goodput(every * step, pause, between, save=save))


def copy_seconds(run: Run, copied: int) -> float | None:
    """Return the seconds in which a rank copies so many bytes to its host, or reads and writes them in a CPU's memory; None: that rate is
    not known."""
    cluster = run.cluster
    if cluster.device.kind == "cpu":
        return 2 * copied / cluster.device.bandwidth if cluster.device.bandwidth else None
    return copied / cluster.host.link if cluster.host.link else None


def best_interval(save: float, between: float) -> float:
    """Return the best seconds of work between two saves of `save` seconds, where faults are `between` seconds apart on average.

    sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d, or M where d >= 2 M: Daly 2006, eq. 37 (doi:10.1016/j.future.2004.11.016);
    its first term is Young's.
    """
    if save >= 2 * between:
        return between
    part = save / (2 * between)
    return sqrt(2 * save * between) * (1 + sqrt(part) / 3 + part / 9) - save


def goodput(interval: float, pause: float, between: float, *, save: float | None = None) -> float:
    """Return the share of the time that is kept work, with a pause for a save after every `interval` seconds of work and a load as long as
    a save. A save takes the pause, or in the background `save` seconds.

    t / (M e^(R/M) (e^((t + d)/M) - 1)): the same paper, eq. 20. It leaves out the time to notice a fault and to restart. A fault while a
    save is under way in the background costs the work before it too: on average what the save takes longer than the pause, beside R.
    Where the work between two saves is shorter than that, the next save waits for the rest.
    """
    save = pause if save is None else save
    pause = max(pause, save - interval)
    again = save + (save - pause)
    if interval + save > 500 * between:
        return 0.0
    return interval / (between * exp(again / between) * expm1((interval + pause) / between))


def missing_rate(run: Run) -> str:
    """Return the key, with its unit, without which no interval is planned."""
    cluster = run.cluster
    if not cluster.storage:
        return "cluster.storage (bytes/s)"
    return "cluster.device.bandwidth (bytes/s)" if cluster.device.kind == "cpu" else "cluster.host.link (bytes/s)"


def evaluation_seconds(run: Run, step: float) -> float:
    """Return the most seconds of an evaluation, given those of a step: its batches, of what is held out and of each validation set, run
    forward only, a third of a step's products; twice where the weights have an average."""
    if not run.train.evaluate.every:
        return 0.0
    times = 2 if run.optim.ema else 1
    return times * run.data.evaluated_sets * run.train.evaluate.batches * step / 3


def stop_seconds(run: Run, step: float | None, save: float | None) -> float:
    """Return the most seconds from a stop request until all is saved, of the times that are known.

    A request is read at the end of a step. One that arrives just after waits for that step's evaluation and save, the next step, and the
    final save; one more step is added as a margin. In the background that step's save waits for the one before.
    """
    saves = 3 if run.checkpoint.in_background else 2
    return (2 * step + evaluation_seconds(run, step) if step else 0.0) + saves * (save or 0.0)


def likely_save_seconds(whole: WholeRun, save: float | None) -> float:
    """Return the planned seconds of a save; where no rate is known, those at ASSUMED_STORAGE."""
    return whole.checkpoint_bytes / ASSUMED_STORAGE if save is None else save


def save_warnings(run: Run, whole: WholeRun, step: float | None, found: Saving) -> Iterator[Problem]:
    """Yield that a run saves much too rarely or too often, or can't save in the time that its launcher gives it to stop."""
    often, save = run.checkpoint.every, found.seconds
    likely = likely_save_seconds(whole, save)
    stop = stop_seconds(run, step, likely)
    by = run.launch.runner if run.launch.name == "deepspeed" else run.launch.name
    if stop > SIGKILL_DELAY and by in KILLERS:
        whose, mend = KILLERS[by]
        takes = f"stopping and saving may take {stop:.0f} s ({_parts(run, step, likely)}{_ASSUMPTION if save is None else ''})"
        says = f"{takes}, but {whose} kills a stopped run after {SIGKILL_DELAY:.0f} s, which then resumes from an earlier checkpoint"
        yield Problem(rule="saving", says=says, mend=f"{mend}, or {'set cluster.storage' if save is None else 'write faster'}")
    if step is None or found.interruptions is None or found.interruptions < ENOUGH:
        return
    number = round(found.interruptions)
    expected = f"about {number:,} {'interruption is' if number == 1 else 'interruptions are'} expected"
    if found.interruptions < 1:
        expected = f"the chance of an interruption is {percent_text(1 - exp(-found.interruptions))}"
    if found.every is None:
        if not often:
            says = f"checkpoint.every=0 saves {_when_without_interval(run)}, and {expected}"
            yield Problem(rule="saving", says=says, mend=f"set checkpoint.every; {missing_rate(run)} tells the best interval")
        return
    assert save is not None
    assert found.pause is not None
    assert found.goodput is not None
    ours = goodput(often * step if often else whole.seconds or 0.0, found.pause, found.mtbf, save=save)
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
