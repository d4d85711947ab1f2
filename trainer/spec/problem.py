"""What is wrong with what a user wrote: a rule's name, a sentence, and a mend."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

LONGEST, MOST_LETTERS = 400, 2000  # letters of a word and of a message that are told whole


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong, and what would be right ("" where nothing was found).

    `changes` are the mends as overrides, each a set that is applied together and was planned again.
    """

    rule: str
    says: str
    mend: str = ""
    changes: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        return f"{self.says}: {self.mend}" if self.mend else self.says


class Unreadable(Exception):
    """What a user wrote can't be understood; carries every problem found (exit status 2)."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


def fault(error: BaseException) -> str:
    """What a user is told of an error that nobody foresaw; it is raised again, with its traceback, where DISTRAIN_TRACEBACK is set."""
    if os.environ.get("DISTRAIN_TRACEBACK"):
        raise error
    why = (str(error) or repr(error)).splitlines()[0]
    return f"{type(error).__name__}: {why}: this is an error of distrain's own: please report it with what DISTRAIN_TRACEBACK=1 shows"


def shortened(text: str) -> str:
    """A message that is too long, or has such words, cut in their middle: what a user pasted by mistake fills no screen."""
    text = re.sub(rf"\S{{{LONGEST},}}", lambda found: f"{found[0][:200]}...{found[0][-40:]}", text)
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS // 2]} ... {text[-MOST_LETTERS // 4 :]}"


def nearest(word: str, known: Iterable[str]) -> str:
    """The sentence that a misspelt word deserves: its near miss, else all that is known."""
    names = sorted(known)
    close = get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return f"known: {', '.join(names)}" if names else "nothing is known here"
