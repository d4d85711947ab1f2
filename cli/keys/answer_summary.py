"""What the answers to keys of another trainer say together: their settings in one line to paste, and the keys that nothing here means."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from functools import cache
from typing import get_type_hints

from ...trainer.spec.problem import Problem
from ...trainer.spec.run import Run
from . import synonyms
from .synonym_rows import ROWS

LEAST_ANSWERS = 2  # unknown keys of another trainer beside which one without an answer is taken for another of its keys
LEAST_SETTINGS = 3  # fewer are pasted from their own lines
_RULES = ("unknown", "option")  # of a wrong key and of a wrong option
_PREFIX = "no key "


def with_summary(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems of a command line or a file; after several keys of another trainer, with one line of all that have a value here,
    and one of those that nothing here means."""
    problems = _join_unanswered(list(problems))
    settings = [each for problem in problems if problem.rule in _RULES for each in written_settings(problem.mend)]
    if len(settings) < LEAST_SETTINGS:
        return problems
    last = {setting.partition("=")[0]: setting for setting in settings}
    line = " ".join(shlex.quote(setting) for setting in last.values())
    return [*problems, Problem(rule="unknown", says="those with a value, to paste", mend=line)]


def written_settings(mend: str) -> list[str]:
    """Return the KEY=VALUEs that an answer says to write; none where the value is left to the user."""
    says, _, note = mend.removeprefix("write ").partition(" (")
    if not mend.startswith("write ") or (note and note.removesuffix(")") not in _notes()):  # else the value has a parenthesis
        return []
    words = says.removesuffix(", without dashes").split(" ")
    are_settings = all(re.fullmatch(r"[a-z][\w.]*=[^`]+", word) for word in words)
    return words if are_settings and not any(word.endswith("=VALUE") for word in words) else []


@cache
def _notes() -> frozenset[str]:
    return frozenset(row.note for row in ROWS)


def _join_unanswered(problems: Sequence[Problem]) -> list[Problem]:
    """Return problems with those of keys that resemble none in one, at the end, where others are keys of another trainer."""
    answered = [each for each in problems if _unknown_key(each) and synonyms.find_synonym(_unknown_key(each))]
    strange = [each for each in problems if _is_strange(_unknown_key(each)) and each.mend.startswith("known: ")]
    if len(answered) < LEAST_ANSWERS or not strange:
        return list(problems)
    names = [_unknown_key(each) for each in strange]
    return [*(each for each in problems if each not in strange), nothing_means(names)]


def _is_strange(key: str) -> bool:
    """Whether a key is in no section of ours, whose keys its problem lists."""
    return bool(key) and key.partition(".")[0] not in get_type_hints(Run)


def nothing_means(names: Sequence[str]) -> Problem:
    """Return the problem of keys or options of another trainer that have no equivalent."""
    return Problem(
        rule="unknown", says=f"nothing here means {', '.join(names)}", mend="leave them out" if len(names) > 1 else "leave it out"
    )


def _unknown_key(problem: Problem) -> str:
    """Return the unknown key that a problem names; "" of another problem."""
    return problem.says.removeprefix(_PREFIX) if problem.rule == "unknown" and problem.says.startswith(_PREFIX) else ""
