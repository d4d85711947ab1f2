"""Mends that hold: every change told to a user was planned again and found to do what it says."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from ..spec.problem import Problem
from ..spec.run import MOST, Run
from ..spec.units import gib
from .broken_rule import Broken
from .changed_run import Change, changed, words
from .engines import Limit, engine_for
from .estimate import Estimator
from .result import Memory
from .rules import broken
from .schedules import SCHEDULES

SHOWN = 3  # mends told of one problem
NEAREST = 2  # layouts told of what an engine does not run
DEEP = 2  # further changes that one may need
MOST_TRIES = 400  # changed runs that are looked at for one problem


def problems_of(run: Run, found: list[Broken]) -> tuple[Problem, ...]:
    """Every broken rule of a run as a problem."""
    return tuple(_problem_of(run, each, found) for each in found)


def _problem_of(run: Run, found: Broken, all_found: list[Broken]) -> Problem:
    """A broken rule as a problem, with those of its changes that mend it and break nothing else."""
    left = iter(range(MOST_TRIES))
    before = {_subject(each) for each in all_found if each is not found}
    held: list[Change] = []
    for change in found.tries:
        whole = _completed(run, change, before, DEEP, left)
        if whole is not None and not any(set(each) <= set(whole) for each in held):
            held.append(whole)
            if len(held) == SHOWN:
                break
    told = tuple(words(change) for change in held)
    mend = f"set {' or '.join(' '.join(each) for each in told)}" if told else found.mend
    return Problem(rule=found.rule, says=found.says, mend=mend, changes=told)


def limits(run: Run) -> tuple[Problem, ...]:
    """What of a run the engine that its layout wants does not run, each with the nearest layouts that it does."""
    _, found = engine_for(run, run.parallel)
    return tuple(_limit_problem(run, each, {limit.key for limit in found}) for each in found)


def _limit_problem(run: Run, found: Limit, keys: set[str]) -> Problem:
    """A limit as a problem. A layout is told that is legal, fits if the run does, and meets none but the run's other limits."""
    before = _broken(run)
    fits = not before and _peak(run) is not None
    held: list[Change] = []
    left = iter(range(MOST_TRIES))
    for change in found.tries:
        whole = _completed(run, change, {_subject(each) for each in before}, DEEP, left) if change else None
        if whole is None or whole in held:
            continue
        new = changed(run, whole)
        if {each.key for each in engine_for(new, new.parallel)[1]} <= keys - {found.key} and not (fits and _peak(new) is None):
            held.append(whole)
    told = tuple(map(words, held[:NEAREST]))
    mend = f"set {' or '.join(' '.join(each) for each in told)}" if told else found.mend
    return Problem(rule="engine", says=found.says, mend=mend, changes=told)


def _peak(run: Run) -> int | None:
    """Bytes of the fullest rank of a legal run; None where it does not fit."""
    estimate = Estimator(run)(run.parallel, run.train.microbatch)
    return estimate.peak if estimate.fits else None


def _subject(found: Broken) -> tuple[str, str]:
    """What a broken rule is about: its sentence's figures may change while it stays broken."""
    return found.rule, found.says.partition("=")[0]


def _completed(run: Run, change: Change, before: set[tuple[str, str]], deep: int, left: Iterator[int]) -> Change | None:
    """A change, with what mends anything that it newly breaks; None where nothing was found."""
    if next(left, None) is None or any(isinstance(value, int) and value > MOST for _, value in change):
        return None
    new = [each for each in _broken(changed(run, change)) if _subject(each) not in before]
    if not new:
        return change
    keys = {key for key, _ in change}
    for further in new[0].tries if deep else ():
        if keys.isdisjoint(key for key, _ in further):
            whole = _completed(run, (*change, *further), before, deep - 1, left)
            if whole is not None:
                return whole
    return None


def _broken(run: Run) -> list[Broken]:
    return broken(run, run.parallel, run.train.microbatch)


def memory_problem(run: Run, memory: Memory) -> Problem:
    """What the fullest stage needs, of what kinds, and the smallest changes under which it fits."""
    held = memory.stages[memory.stage].bytes
    kinds = sorted(
        ((getattr(held, kind), kind) for kind in ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")),
        reverse=True,
    )
    largest = ", ".join(f"{kind} {gib(size)}" for size, kind in kinds[:3])
    says = f"needs {gib(memory.peak)} GiB of {gib(memory.capacity)} on stage {memory.stage}: {largest}"
    fits = list(fitting(run))[:SHOWN]
    told = tuple(words(change) for change, _ in fits)
    if not fits:
        return Problem(rule="memory", says=says, mend="no change of layout was found that fits on this cluster")
    names = [f"{' '.join(each)} ({gib(peak)})" for each, (_, peak) in zip(told, fits, strict=True)]
    return Problem(rule="memory", says=says, mend=f"fits with {' or '.join(names)}", changes=told)


def fitting(run: Run) -> Iterator[tuple[Change, int]]:
    """Changes under which a run fits, with the peak then: the first of one key that do, else of two, else of three, else more nodes.

    The order is from what costs least to what costs most: recomputing attention's core, a schedule that holds less, shards
    over all replicas, splitting what tensor parallel left whole, sharding more, a smaller micro-batch, recomputing all,
    more ranks for the model, the host's memory, more nodes.
    """
    steps = list(_steps(run))
    for size in (1, 2, 3):
        found = [each for change in _together(steps, size) if (each := _fits(run, change)) is not None]
        if found:
            yield from found
            return
    every = [(), *steps, *_together(steps, 2)]
    for times in (2, 4, 8, 16, 32, 64, 128):
        for change in every:
            each = _fits(run, (("cluster.nodes", run.cluster.nodes * times), *change))
            if each is not None:
                yield each
                return


def _together(steps: list[Change], size: int) -> Iterator[Change]:
    for several in combinations(steps, size):
        keys = [key for change in several for key, _ in change]
        if len(keys) == len(set(keys)):
            yield tuple(pair for change in several for pair in change)


def _fits(run: Run, change: Change) -> tuple[Change, int] | None:
    """The change and the peak under it, if the run is then legal, fits, and is still run by an engine if one ran it before."""
    change = _filled(run, change)
    new = changed(run, change)
    if _broken(new):
        return None
    if engine_for(run, run.parallel)[0] is not None and engine_for(new, new.parallel)[0] is None:
        return None
    peak = _peak(new)
    return None if peak is None else (change, peak)


def _filled(run: Run, change: Change) -> Change:
    """A change of degrees or nodes, with the data degree that a user set made to fill the cluster again."""
    new = changed(run, change)
    ranks, others = new.cluster.nodes * new.cluster.gpus, new.parallel.tp * new.parallel.pp * new.parallel.cp
    if run.parallel.dp in ("auto", ranks // others) or ranks % others:
        return change
    return (*change, ("parallel.dp", ranks // others))


def _steps(run: Run) -> Iterator[Change]:
    """Single changes, smallest first."""
    parallel, train = run.parallel, run.train
    if parallel.recompute == "none" and train.attention == "math":
        yield (("parallel.recompute", "selective"),)
    if parallel.pp > 1 and SCHEDULES[parallel.schedule].forward_first:
        yield (("parallel.schedule", "1f1b"),)
    if parallel.zero and parallel.shard != "all":
        yield (("parallel.shard", "all"),)
    if parallel.tp > 1 and not parallel.sequence:
        yield (("parallel.sequence", True),)
    for zero in range(parallel.zero + 1, 4):
        yield (("parallel.zero", zero),)
    if train.microbatch > 1:
        for micro in (train.microbatch // 2, train.microbatch // 4, 1):
            if 0 < micro < train.microbatch and train.microbatch % micro == 0:
                yield (("train.microbatch", micro),)
    if parallel.recompute != "full":
        yield (("parallel.recompute", "full"),)
    if train.attention == "math":
        yield (("train.attention", "flash"),)
    for axis, most in (("tp", run.cluster.gpus), ("pp", run.model.layers), ("cp", run.cluster.gpus)):
        now = getattr(parallel, axis)
        for times in (2, 4, 8):
            if now * times <= most and (axis != "tp" or run.model.heads % (now * times) == 0):  # rather than pad
                yield ((f"parallel.{axis}", now * times),)
    if not parallel.offload.optimizer:
        yield (("parallel.offload.optimizer", True),)
