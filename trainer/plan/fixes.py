"""Fixes of problems: each change shown to a user has been planned again and fixes what it says."""

from __future__ import annotations

from collections.abc import Iterator

from ..spec.changed_run import Change, overrides, with_changes
from ..spec.numbers.bounded import MOST
from ..spec.problem import Problem
from ..spec.run import Run
from .engines import engine_for
from .engines.engine_limit import EngineLimit
from .estimate import Estimator
from .rules.broken_rule import BrokenRule
from .rules.rules import broken_rules

SHOWN = 3  # fixes shown for one problem
NEAREST = 2  # layouts shown for a limit of an engine
MOST_FURTHER_CHANGES = 2  # further changes that one change may need
MOST_TRIES = 400  # changed runs that are planned for one problem


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
