"""The config keys, from the data classes, and hints for a key that does not exist."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ...trainer.spec.problem import Problem, no_key_problem, suggest_name
from ...trainer.spec.read import accepts, value_text
from ...trainer.spec.run import Run
from . import synonyms

LISTED_KEYS = 20  # keys of a section that an answer lists
WRITTEN_KEYS = ("reading", "model.parameters", "parallel.actions")  # set by distrain, not by users


@cache
def config_keys() -> Mapping[str, Any]:
    """Return every key that takes a value (`parallel.tp`), and its type."""
    return MappingProxyType({key: hint for key, hint in _keys_of(Run, "") if key not in WRITTEN_KEYS})


def _keys_of(section: type, at: str) -> Iterator[tuple[str, Any]]:
    for name, hint in get_type_hints(section, include_extras=True).items():
        if inner := _section_type(hint):
            yield from _keys_of(inner, f"{at}{name}.")
        else:
            yield f"{at}{name}", hint


def takes_text(hint: Any) -> bool:
    """Whether a key of this type takes any text."""
    return hint in (str, str | None, str | tuple[str, ...] | None)


def takes_own_names(hint: Any) -> bool:
    """Whether a key of this type takes a mapping whose keys are the user's own names: data.validate.NAME=PATH."""
    return any(get_origin(kind) is dict and get_args(kind)[0] is str for kind in get_args(hint))


def unknown_key_problem(key: str, known: Mapping[str, Any], value: Any = None) -> Problem | None:
    """Return the problem of a key that does not exist, with the user's value in its fix; None if it exists."""
    if key in known:
        return None
    sections = _sections(known)
    section, _, name = key.rpartition(".")
    if key in sections or (section in known and (name in _mapping_keys(known[section]) or takes_own_names(known[section]))):
        return None
    if names := _mapping_keys(known.get(section)):
        return no_key_problem(key, suggest_name(name, names))
    if right := respelled_key(key, known):
        return no_key_problem(key, f"did you mean {right}?") if value in (None, "") else write_instead(key, right, value_text(value))
    if synonym := synonyms.synonym_problem(key, value):
        return synonym
    same = same_named_keys(key, known) if "." not in key and value not in (None, "") else []
    if len(same) == 1 and accepts(same[0], value):
        return write_instead(key, same[0], value_text(value))
    return no_key_problem(key, _suggest_key(key, known, sections))


def write_instead(key: str, ours: str, value: str, note: str = "") -> Problem:
    """Return the problem of a key in whose place one of ours is to be written; an empty value is left to the user."""
    return no_key_problem(key, f"write {ours}={value or 'VALUE'}{note}", [f"{ours}={value}"] if value else [])


def respelled_key(key: str, known: Mapping[str, Any]) -> str:
    """Return the key that differs in case, accents or separators only (MODEL/layers, train.micro-batch); "" if there is none."""
    plain = unicodedata.normalize("NFKD", re.sub(r"\[\d*\]$", "", key)).encode("ascii", "ignore").decode()
    same = [each for each in known if _letters_and_digits(each) == _letters_and_digits(plain)]
    return same[0] if len(same) == 1 and same[0] != key else ""


def _letters_and_digits(key: str) -> str:
    return re.sub(r"[^a-z0-9]", "", key.lower())


def completion_values(key: str) -> list[str]:
    """Return the values that shell completion offers for a key: its choices, else its default."""
    kind: Any = Run
    *above, last = key.split(".")
    for name in above:
        kind = _section_type(get_type_hints(kind).get(name)) if kind else None
    row = next((row for row in fields(kind) if row.name == last), None) if kind else None
    if row is None or kind is None:
        return []
    hint = get_type_hints(kind)[last]
    if hint is bool:
        return ["true", "false"]
    if get_origin(hint) is Literal:
        return list(map(str, get_args(hint)))
    return [str(row.default)] if row.default not in (MISSING, None) and not isinstance(row.default, tuple) else []


def _suggest_key(key: str, known: Mapping[str, Any], sections: set[str]) -> str:
    if same := same_named_keys(key, known):
        return f"did you mean {' or '.join(same)}?"
    last = key.rpartition(".")[2]
    close = get_close_matches(key, [*known, *sections], n=1, cutoff=0.7) or _suggest_last_part(last, known)
    if close:
        return f"did you mean {close[0]}?"
    section = key.rpartition(".")[0]
    inside = [each for each in known if each.startswith(f"{section}.")] if section else []
    if len(inside) > LISTED_KEYS:
        return f"known: the {len(inside)} keys that `distrain ls {section}` explains"
    return f"known: {', '.join(inside or sorted(each for each in sections if '.' not in each))}"


def same_named_keys(key: str, known: Iterable[str]) -> list[str]:
    """Return the keys that differ from `key` in their section alone."""
    return [each for each in known if each.rpartition(".")[2] == key.rpartition(".")[2]]


def _suggest_last_part(last: str, known: Mapping[str, Any]) -> list[str]:
    by_last = {key.rpartition(".")[2]: key for key in reversed(list(known))}
    return [by_last[each] for each in get_close_matches(last, by_last, n=1, cutoff=0.75)]


def _sections(known: Mapping[str, Any]) -> set[str]:
    return {key[:at] for key in known for at, letter in enumerate(key) if letter == "."}


def _section_type(hint: Any) -> Any:
    return next((kind for kind in (hint, *get_args(hint)) if is_dataclass(kind)), None)


def _mapping_keys(hint: Any) -> tuple[Any, ...]:
    """Return the keys of a mapping whose keys are fixed (`peak.bf16`)."""
    return tuple(_literal_values(get_args(hint)[0])) if get_origin(hint) is dict else ()


def _literal_values(hint: Any) -> Iterator[Any]:
    yield from get_args(hint) if get_origin(hint) is Literal else ()
