"""Fixes of problems: each change shown to a user has been planned again and fixes what it says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import combinations

from ..models.families import is_made_by_transformers
from ..spec.changed_run import Change, overrides, with_changes
from ..spec.keys.units import gib_text
from ..spec.numbers.bounded import MOST
from ..spec.problem import Problem
from ..spec.run import Run
from .costs.precision import widths
from .engines import data_ranks, engine_for
from .engines.engine_limit import EngineLimit
from .estimate import Estimator
from .layout.mesh import replica_size
from .layout.schedule_of_run import schedule_of
from .plan_data import Memory
from .rules.broken_rule import BrokenRule
from .rules.rules import broken_rules

SHOWN = 3  # fixes shown for one problem
NEAREST = 2  # layouts shown for a limit of an engine
MOST_FURTHER_CHANGES = 2  # further changes that one change may need
MOST_TRIES = 400  # changed runs that are planned for one problem
LOSS_CHUNKS = 8  # for which logits are offered to be cut where they take a share of the device's memory of at least LOGITS_SHARE
LOGITS_SHARE = 1 / 32


def problems_with_fixes(run: Run, broken: list[BrokenRule]) -> tuple[Problem, ...]:
    """Return every broken rule of a run as a problem."""
    return tuple(_rule_problem(run, each, broken) for each in broken)


def _rule_problem(run: Run, rule: BrokenRule, broken: list[BrokenRule]) -> Problem:
    """Return a broken rule as a problem, with those of its candidate changes that fix it and break no other rule."""
    left = iter(range(MOST_TRIES))
    others = {_subject(each) for each in broken if each is not rule}
    fixes: list[Change] = []
    for candidate in rule.candidates:
        change = _completed_change(run, candidate, others, MOST_FURTHER_CHANGES, left)
        if change is not None and not any(set(each) <= set(change) for each in fixes):
            fixes.append(change)
            if len(fixes) == SHOWN:
                break
    return _problem(rule.rule, rule.says, fixes, rule.fix)


def engine_problems(run: Run) -> tuple[Problem, ...]:
    """Return the limits of its engine that a run exceeds, each with the nearest layouts that the engine runs."""
    _, limits = engine_for(run, run.parallel)
    return tuple(_limit_problem(run, each, {limit.key for limit in limits}) for each in limits)


def _limit_problem(run: Run, limit: EngineLimit, keys: set[str]) -> Problem:
    """Return a limit as a problem. Its fixes are legal layouts that fit if the run does, and exceed no limit but the run's others."""
    broken = {_subject(each) for each in _broken_rules(run)}
    fits = not broken and _peak(run) is not None
    fixes: list[Change] = []
    left = iter(range(MOST_TRIES))
    for candidate in limit.candidates:
        change = _completed_change(run, candidate, broken, MOST_FURTHER_CHANGES, left) if candidate else None
        if change is None or change in fixes:
            continue
        changed = with_changes(run, change)
        if {each.key for each in engine_for(changed, changed.parallel)[1]} <= keys - {limit.key} and not (fits and _peak(changed) is None):
            fixes.append(change)
    return _problem("engine", limit.says, fixes[:NEAREST], limit.fix)


def _problem(rule: str, says: str, fixes: list[Change], otherwise: str) -> Problem:
    """Return a problem that tells its fixes as overrides, or a fix in words where there are none."""
    changes = tuple(map(overrides, fixes))
    mend = f"set {' or '.join(' '.join(each) for each in changes)}" if changes else otherwise
    return Problem(rule=rule, says=says, mend=mend, changes=changes)


def _peak(run: Run) -> int | None:
    """Return the bytes of the fullest rank of a legal run; None where it does not fit."""
    estimate = Estimator(run)(run.parallel, run.train.microbatch)
    return estimate.peak if estimate.fits else None


def _subject(rule: BrokenRule) -> tuple[str, str]:
    """Return the subject of a broken rule, without the figures of its sentence: they may change while the rule stays broken."""
    return rule.rule, rule.says.partition("=")[0]


def _completed_change(run: Run, change: Change, before: set[tuple[str, str]], depth: int, left: Iterator[int]) -> Change | None:
    """Return a change together with changes that fix any rule that it newly breaks; None where there are none."""
    if next(left, None) is None or any(isinstance(value, int) and value > MOST for _, value in change):
        return None
    new = [each for each in _broken_rules(with_changes(run, change)) if _subject(each) not in before]
    if not new:
        return change
    keys = {key for key, _ in change}
    for further in new[0].candidates if depth else ():
        if keys.isdisjoint(key for key, _ in further):
            completed = _completed_change(run, (*change, *further), before, depth - 1, left)
            if completed is not None:
                return completed
    return None


def _broken_rules(run: Run) -> list[BrokenRule]:
    return broken_rules(run, run.parallel, run.train.microbatch)


def memory_problem(run: Run, memory: Memory) -> Problem:
    """Return the problem of a run that does not fit: bytes of the fullest stage by kind, and the smallest changes with which it fits."""
    if host := memory.full_host:
        held, where = asdict(host.rank), "of a rank "
        needs = f"{gib_text(host.node)} GiB of {gib_text(host.capacity or 0)} on each node's host"
    else:
        held, where = asdict(memory.stages[memory.stage].bytes), ""
        needs = f"{gib_text(memory.peak)} GiB of {gib_text(memory.capacity)} on stage {memory.stage}"
    rows = sorted(((size, kind) for kind, size in held.items() if kind != "total"), reverse=True)
    largest = ", ".join(f"{kind} {gib_text(size)}" for size, kind in rows[:3] if size or not where)
    says = f"needs {needs}: {where}{largest}"
    fits = list(fitting_changes(run))[:SHOWN]
    changes = tuple(overrides(change) for change, _ in fits)
    if not fits:
        return Problem(rule="memory", says=says, mend="no change of layout was found that fits on this cluster")
    names = [f"{' '.join(each)} ({gib_text(peak)})" for each, (_, peak) in zip(changes, fits, strict=True)]
    return Problem(rule="memory", says=says, mend=f"fits with {' or '.join(names)}", changes=changes)


def fitting_changes(run: Run) -> Iterator[tuple[Change, int]]:
    """Yield changes with which a run fits, and the peak bytes then: of one key; if there are none, of two, then of three, then more nodes.

    The order is by cost, from the least: saves that training waits for, compiled layers, the loss in chunks, recomputing attention's core,
    a schedule that holds less, sharding over all replicas, splitting what tensor parallelism left whole, sharding more, a smaller
    micro-batch, recomputing all, more ranks for the model, the host's memory, the engine that leaves less on the device, more nodes.
    """
    single, peaks = list(dict.fromkeys(_single_changes(run))), _ChangedPeaks(run)
    for size in (1, 2, 3):
        found = [each for change in _combined_changes(single, size) if (each := peaks.fitting_change(change)) is not None]
        if found:
            yield from found
            return
    changes = [(), *single, *_combined_changes(single, 2)]
    for times in (2, 4, 8, 16, 32, 64, 128):
        for change in changes:
            each = peaks.fitting_change((("cluster.nodes", run.cluster.nodes * times), *change))
            if each is not None:
                yield each
                return


def _combined_changes(changes: list[Change], size: int) -> Iterator[Change]:
    """Yield every `size` changes of different keys as one."""
    for several in combinations(changes, size):
        keys = [key for change in several for key, _ in change]
        if len(keys) == len(set(keys)):
            yield tuple(pair for change in several for pair in change)


class _ChangedPeaks:
    """Peak bytes of a run under changes. Changes of parallel.* and the micro-batch alone share an estimator, which keeps their costs; each
    set of other keys has an estimator of its own."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._has_engine = engine_for(run, run.parallel)[0] is not None
        self._estimators: dict[Change, Estimator | None] = {}

    def fitting_change(self, change: Change) -> tuple[Change, int] | None:
        """Return the change and the peak bytes with it, if the run is then legal, fits, and still has an engine if it had one."""
        change = _filling_change(self.run, change)
        changed = with_changes(self.run, change)
        estimator = self._estimator(changed, change)
        if estimator is None:
            return None
        estimate = estimator(changed.parallel, changed.train.microbatch)
        if estimate.peak is None or not estimate.fits:
            return None
        if self._has_engine and engine_for(changed, changed.parallel)[0] is None:
            return None
        return change, estimate.peak

    def _estimator(self, changed: Run, change: Change) -> Estimator | None:
        """The estimator of the changed run; None where it breaks a rule in every layout."""
        key = tuple([pair for pair in change if not pair[0].startswith("parallel.") and pair[0] != "train.microbatch"])
        if key not in self._estimators:
            try:
                self._estimators[key] = Estimator(changed)
            except ValueError:
                self._estimators[key] = None
        return self._estimators[key]


def _filling_change(run: Run, change: Change) -> Change:
    """Return a change of degrees or nodes, with a data degree that fills the cluster again where the user set one."""
    new = with_changes(run, change)
    ranks, others = new.cluster.nodes * new.cluster.gpus, replica_size(new.parallel)
    if run.parallel.dp in ("auto", ranks // others) or ranks % others:
        return change
    return (*change, ("parallel.dp", ranks // others))


def _single_changes(run: Run) -> Iterator[Change]:
    """Yield changes that save memory, the cheapest first."""
    parallel, train, is_gpu = run.parallel, run.train, run.cluster.device.kind == "cuda"
    for applies, key, value in (
        (run.checkpoint.in_background, "checkpoint.background", False),
        (not train.compile and parallel.zero < 3 and is_gpu, "train.compile", True),
        (train.loss_chunks == 1 and _has_large_logits(run), "train.loss_chunks", LOSS_CHUNKS),
        (parallel.recompute == "none" and (train.attention == "math" or run.model.dropout), "parallel.recompute", "selective"),
        (parallel.pp > 1 and schedule_of(parallel).forward_first, "parallel.schedule", "1f1b"),
        (parallel.zero and parallel.shard != "all", "parallel.shard", "all"),
        (parallel.tp > 1 and not parallel.sequence, "parallel.sequence", True),
        *((True, "parallel.zero", zero) for zero in range(parallel.zero + 1, 4)),
        *((True, "train.microbatch", micro) for micro in _smaller_microbatches(train.microbatch)),
        (parallel.recompute != "full", "parallel.recompute", "full"),
        (train.attention == "math", "train.attention", "flash"),
        *((True, key, degree) for key, degree in _larger_degrees(run)),
        (not parallel.offload.optimizer, "parallel.offload.optimizer", True),
        (parallel.zero == 3 and parallel.offload.names == ("optimizer",), "parallel.offload.parameters", True),
    ):
        if applies:
            yield ((key, value),)
    if moved := parallel.offload.names:
        yield tuple([(f"parallel.offload.{name}", False) for name in moved])
    if run.engine == "auto" and data_ranks(run, parallel) == 1 and is_gpu:
        yield (("engine", "zero"),)  # which leaves fewer gradients on the device beside an offloaded optimizer


def _smaller_microbatches(microbatch: int) -> Iterator[int]:
    """Yield a half, a quarter, and one sequence, those that divide the micro-batch."""
    for micro in (microbatch // 2, microbatch // 4, 1):
        if 0 < micro < microbatch and microbatch % micro == 0:
            yield micro


def _larger_degrees(run: Run) -> Iterator[tuple[str, int]]:
    """Yield (key, degree): twice, four and eight times the ranks of an axis that splits the model, as far as they go."""
    for axis, most in (("tp", run.cluster.gpus), ("pp", run.model.repeated_layers), ("cp", run.cluster.gpus)):
        for times in (2, 4, 8):
            degree = getattr(run.parallel, axis) * times
            if degree <= most and (axis != "tp" or run.model.heads % degree == 0):  # rather than pad
                yield f"parallel.{axis}", degree


def _has_large_logits(run: Run) -> bool:
    """Whether the logits of a micro-batch on a rank, of our own head, are a large part of what a device holds."""
    parallel, train = run.parallel, run.train
    elements = train.microbatch * train.seq * run.model.vocab / (parallel.cp * parallel.tp)
    return not is_made_by_transformers(run.model) and elements * widths(run).activation >= LOGITS_SHARE * int(run.cluster.device.memory)
