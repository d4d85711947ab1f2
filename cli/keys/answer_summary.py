"""What the answers to keys of another trainer say together: their settings in one line to paste, and the keys that nothing here means."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import get_type_hints

from ...trainer.spec.problem import Problem
from ...trainer.spec.run import Run
from . import synonyms

LEAST_ANSWERS = 2  # unknown keys of another trainer beside which one without an answer is taken for another of its keys
LEAST_SETTINGS = 3  # fewer are pasted from their own lines


def with_summary(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems of a command line or a file; after several keys of another trainer, with one line of all that have a value here,
    and one of those that nothing here means."""
    problems = _join_unanswered(list(problems))
    settings = [each for problem in problems for each in problem.settings]
    if len(settings) < LEAST_SETTINGS:
        return problems
    last = {setting.partition("=")[0]: setting for setting in settings}
    line = " ".join(shlex.quote(setting) for setting in last.values())
    return [*problems, Problem(rule="unknown", says="those with a value, to paste", mend=line)]


def _join_unanswered(problems: Sequence[Problem]) -> list[Problem]:
    """Return problems with those of keys that resemble none in one, at the end, where others are keys of another trainer."""
    answered = [each for each in problems if each.key and synonyms.find_synonym(each.key)]
    strange = [each for each in problems if _is_strange(each.key) and each.mend.startswith("known: ")]
    if len(answered) < LEAST_ANSWERS or not strange:
        return list(problems)
    return [*(each for each in problems if each not in strange), nothing_means([each.key for each in strange])]


def _is_strange(key: str) -> bool:
    """Whether a key is in no section of ours, whose keys its problem lists."""
    return bool(key) and key.partition(".")[0] not in get_type_hints(Run)


def nothing_means(names: Sequence[str]) -> Problem:
    """Return the problem of keys or options of another trainer that have no equivalent."""
    return Problem(
        rule="unknown", says=f"nothing here means {', '.join(names)}", mend="leave them out" if len(names) > 1 else "leave it out"
    )
