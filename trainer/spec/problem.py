"""A problem with what the user wrote: the rule, a sentence, and the fix."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

LONGEST_WORD, LONGEST_MESSAGE = 400, 2000  # characters of a word and of a message that are printed in full

_KEYBOARD = str.maketrans(
    {"\u2212": "-", "\u2013": "-", "\u2010": "-", "\u00d7": "x", "\uff0c": ",", "\uff0e": ".", "\u00a0": None, "\u202f": None}
)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem and its fix (`mend`; "" if none was found).

    `changes` are fixes as overrides; each is a set that is applied together and that was planned again. `key` is the key that does not
    exist, of a problem of one. `settings` are the KEY=VALUEs that `mend` says to write; none where the value is left to the user.
    """

    rule: str
    says: str
    mend: str = ""
    changes: tuple[tuple[str, ...], ...] = ()
    key: str = ""
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.says}: {self.mend}" if self.mend else self.says


def no_key_problem(key: str, mend: str, settings: Iterable[str] = ()) -> Problem:
    """Return the problem of a key that does not exist."""
    return Problem(rule="unknown", says=f"no key {key}", mend=mend, key=key, settings=tuple(settings))


class Unreadable(Exception):
    """The user's input can't be used; carries every problem found (exit status 2)."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


def unexpected_error_text(error: BaseException) -> str:
    """Return the message for an unexpected error; re-raise it, with its traceback, if DISTRAIN_TRACEBACK is set."""
    if os.environ.get("DISTRAIN_TRACEBACK"):
        raise error
    why = (str(error) or repr(error)).splitlines()[0]
    return f"{type(error).__name__}: {why}: this is a bug in distrain: please report it with the output of DISTRAIN_TRACEBACK=1"


def shorten(text: str) -> str:
    """Return a message with long words, or the message itself, cut in the middle, so that pasted text does not fill the screen."""
    text = re.sub(rf"\S{{{LONGEST_WORD},}}", lambda found: f"{found[0][:200]}...{found[0][-40:]}", text)
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE // 2]} ... {text[-LONGEST_MESSAGE // 4 :]}"


def plain_characters(text: str) -> str:
    """Return a text with the characters of a keyboard in place of those that documents have for them: 3e-4, 2x8."""
    return text.translate(_KEYBOARD)


def suggest_name(word: str, known: Iterable[str], at: str = "") -> str:
    """Return a hint for a misspelt name: the one in other case, the closest known name, behind the section `at`, else all known names."""
    names = sorted(known)
    same = [each for each in names if each.casefold() == word.casefold()]
    close = same or get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {at}{close[0]}?"
    return f"known: {', '.join(names)}" if names else "nothing is known here"


def one_line(text: str) -> str:
    """Return text with control characters escaped, so that a message is one line."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
