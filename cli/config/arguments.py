"""The words of a command line: `conf=NAME` and overrides, split and checked before anything is composed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...trainer.spec.problem import Problem, suggest_name
from ...trainer.spec.read import type_text
from . import library, synonyms
from .cluster_shape import is_shape
from .keys import keys, texts, unknown

LONGEST = 10_000  # letters of a word that is read


@dataclass(frozen=True, kw_only=True)
class Words:
    """What `conf=` names, the overrides, and what is wrong already."""

    conf: str
    overrides: tuple[str, ...]
    problems: tuple[Problem, ...]
    notes: tuple[Problem, ...] = ()  # what of them does nothing


def read_words(words: Sequence[str], verb: str, config_dir: Path | None) -> Words:
    """Sort the words of `distrain VERB conf=NAME [KEY=VALUE ...]`."""
    confs = [word.removeprefix("conf=") for word in words if word.startswith("conf=")]
    rest = [word for word in words if not word.startswith("conf=")]
    bare = [word for word in rest if "=" not in word and not word.startswith("~")]
    problems = [_bare(word, config_dir) for word in bare]
    if len(confs) > 1:
        problems.insert(0, Problem(rule="conf", says=f"conf is given {len(confs)} times ({', '.join(confs)})", mend="give it once"))
    elif confs == [""]:
        problems.insert(0, Problem(rule="conf", says="conf= names no recipe", mend="`distrain ls` lists them"))
    elif not confs and not any(problem.rule == "conf" for problem in problems):
        mend = f"distrain {verb} conf=NAME; `distrain ls` lists the recipes"
        problems.insert(0, Problem(rule="conf", says="conf=NAME is missing", mend=mend))
    long = [word for word in rest if len(word) > LONGEST and word not in bare]
    problems += [Problem(rule="syntax", says=f"{word} has {len(word):,} letters", mend="say it in a recipe: conf=FILE") for word in long]
    overrides = tuple(word for word in rest if word not in bare and word not in long)
    return Words(conf=confs[0] if confs else "", overrides=overrides, problems=tuple(problems), notes=tuple(_said_again(overrides)))


def _said_again(overrides: Sequence[str]) -> Iterator[Problem]:
    """The overrides that a later one of the same key takes back; a cluster's size stands beside its option."""
    last: dict[tuple[str, bool], str] = {}
    for word in reversed(overrides):
        key, _, value = word.partition("=")
        about = (key.lstrip("+~"), is_shape(value))
        if about in last:
            yield Problem(rule="idle", says=f"{word} does nothing", mend=f"{last[about]} comes after it")
        last.setdefault(about, word)


def _bare(word: str, config_dir: Path | None) -> Problem:
    if word in library.recipes(config_dir) or os.path.isfile(word):
        return Problem(rule="conf", says=f"{word} stands alone", mend=f"write conf={word}")
    key = word.lstrip("+")
    if key in library.groups(config_dir):
        return Problem(rule="syntax", says=f"{word} names no option", mend=f"write {word}=NAME; `distrain ls {key}` lists them")
    known = keys()
    if not unknown(key, known):
        return Problem(rule="syntax", says=f"{word} has no value", mend=f"write {word}=VALUE")
    if theirs := synonyms.answer(key):
        return theirs
    near = library.near(word, library.recipes(config_dir))
    if near.startswith("did"):
        return Problem(rule="conf", says=f"{word} stands alone", mend=near.replace("mean ", "mean conf=").replace(" or ", " or conf="))
    return Problem(rule="syntax", says=f"{word!r} is neither conf=NAME nor KEY=VALUE")


def unread(word: str, known: Mapping[str, Any]) -> Problem:
    """What is wrong with an override that Hydra's grammar can't read."""
    key, _, value = word.partition("=")
    if not key.strip("+~ "):
        return Problem(rule="syntax", says=f"{word} has no key", mend="write KEY=VALUE")
    if not value:
        return Problem(rule="syntax", says=f"{word} has no value", mend=f"write {key}=VALUE")
    if value.startswith("interval("):
        return Problem(rule="syntax", says=f"{word} has no end of values", mend=f"write {key}=range(START,STOP,STEP)")
    if value.startswith("="):
        return Problem(rule="syntax", says=f"{word} has two equals signs", mend=f"write {key}={value.lstrip('=')}")
    bare = key.lstrip("+~").split("@")[0]
    wrong_key = unknown(bare, known, value.strip(" '\""))
    if wrong_key and not re.fullmatch(r"[\w-]+([./][\w-]+)*", bare, flags=re.ASCII):
        return Problem(rule="syntax", says=f"{word}: {bare} is no key", mend=wrong_key.mend)
    if bare in known and bare not in texts(known) and not re.search(r"[\[\](){}'\"]", value):
        says = f"{key}={value} is not {type_text(known[bare])}"
        return Problem(rule="type", says=says, mend="give the token's id" if bare == "data.end" else "")
    return Problem(rule="syntax", says=f"{word}: the value can't be read", mend="close every bracket and quote")


def usage(wrong: Any, argv: Sequence[str] = ()) -> Problem:
    """A wrong option in our words; `argv` is the command line that has it."""
    name = getattr(wrong, "option_name", None)
    message = str(wrong.format_message()).splitlines()[0].rstrip(".")
    if name is None or not message.startswith("No such option"):
        return Problem(rule="option", says=message[:1].lower() + message[1:])
    known = [each for row in wrong.ctx.command.params for each in row.opts if each.startswith("--")] if wrong.ctx else []
    key, value = name.lstrip("-"), _value_of(name, argv)
    if theirs := synonyms.answer(key, value or None):
        return Problem(rule="option", says=f"no option {name}", mend=theirs.mend)
    if "." in name or "=" in name:
        return Problem(rule="option", says=f"no option {name}", mend=f"keys are written without dashes: {key}={value or 'VALUE'}")
    return Problem(rule="option", says=f"no option {name}", mend=suggest_name(name, [*known, "--help"]))


def _value_of(option: str, argv: Sequence[str]) -> str:
    """What stands after an option, behind an equals sign or as the next word; "" where nothing does."""
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if word == option:
            return following if not following.startswith("-") and "=" not in following else ""
    return ""
