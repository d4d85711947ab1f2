"""What a config key is, for people: what it takes, its unit, its default and a sentence, from the data classes and `spec/keys.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ...trainer.spec.keys import KEYS
from ...trainer.spec.read import type_text, value_text
from ...trainer.spec.run import Run
from .keys import WRITTEN_KEYS

REQUIRED = "required"
HUGE = 1e15  # a bound from which on nobody is told of it


@dataclass(frozen=True, kw_only=True)
class KeyHelp:
    """One key: `takes` says its type or choices, `default` is its value as a recipe writes it, or "required"."""

    key: str
    says: str
    unit: str
    takes: str
    choices: tuple[str, ...]
    default: str
    null: str


def key_help(word: str) -> list[KeyHelp]:
    """The key that a word names, or every key of a section; none where it names neither."""
    below = f"{word}."
    return [_help(key, hint, row) for key, hint, row in key_fields() if (key == word or key.startswith(below)) and key not in WRITTEN_KEYS]


def key_fields(of: type = Run, at: str = "") -> Iterator[tuple[str, Any, Field[Any] | None]]:
    """Every key in the order of the data classes with its type and its field, also what distrain writes.

    A section that may be null and a mapping of fixed words stand before their own keys; a mapping's words have no field.
    """
    hints = get_type_hints(of, include_extras=True)
    for row in fields(of):
        key, hint = f"{at}{row.name}", hints[row.name]
        section = next((kind for kind in (hint, *get_args(hint)) if is_dataclass(kind)), None)
        if section is None or section is not hint:
            yield key, hint, row
        if isinstance(section, type):
            yield from key_fields(section, f"{key}.")
        elif get_origin(hint) is dict and get_origin(get_args(hint)[0]) is Literal:
            yield from ((f"{key}.{word}", get_args(hint)[1], None) for word in get_args(get_args(hint)[0]))


def sections() -> set[str]:
    """Every section: what stands before a dot of some key."""
    return {key[:at] for key, _, _ in key_fields() for at, letter in enumerate(key) if letter == "."}


def key_choices(key: str, hint: Any) -> tuple[str, ...]:
    """The words that a key takes, of its type or of the table in which it is looked up; none where it takes others too."""
    if key == "model.family":
        from ...trainer.models.families import FAMILIES

        return tuple(FAMILIES)
    if key == "parallel.schedule":
        from ...trainer.plan.schedules import SCHEDULES

        return tuple(SCHEDULES)
    if key == "engine":
        from ...trainer.plan.engines import ENGINES

        return ("auto", *ENGINES)
    return tuple(map(str, get_args(hint))) if get_origin(hint) is Literal else ()


def key_comments() -> dict[str, str]:
    """A comment for every key: what it is, its choices and its unit."""
    found = {}
    for key, hint, _ in key_fields():
        choices, row = key_choices(key, hint), KEYS[key]
        unit, null = f" ({row.unit})" if row.unit else "", f"; null: {row.null}" if row.null else ""
        found[key] = row.says + unit + (f"; {', '.join(choices)}" if choices else "") + null
    return found


def help_json(rows: list[KeyHelp]) -> list[dict[str, Any]]:
    """Keys as plain data."""
    return [asdict(row) for row in rows]


def _help(key: str, hint: Any, row: Field[Any] | None) -> KeyHelp:
    choices, said = key_choices(key, hint), KEYS[key]
    takes = f"one of {', '.join(choices)}" if choices else type_summary(hint)
    default = family_defaults(key) or _default(row)
    return KeyHelp(key=key, says=said.says, unit=said.unit, takes=takes, choices=choices, default=default, null=said.null)


def family_defaults(key: str) -> str:
    """The defaults of a key that each family of models has its own of: "by family: gpt layernorm, ..."; "" of any other key."""
    from ...trainer.models.families import FAMILIES

    name = key.removeprefix("model.")
    found = {family: value_text(row.defaults[name]) for family, row in FAMILIES.items() if name in row.defaults and key != name}
    return f"by family: {', '.join(f'{family} {value}' for family, value in found.items())}" if found else ""


def type_summary(hint: Any) -> str:
    """A type as words, a bound and what may stand in its place told apart: a number, at least 0, or auto.

    Bounds that are only there to keep products of numbers finite are left out.
    """
    words = re.sub(r", at most (\S+e\+\d+)", lambda bound: bound[0] if float(bound[1]) < HUGE else "", type_text(hint))
    words = re.sub(r"at least (\S+e-\d+)", lambda bound: bound[0] if float(bound[1]) > 1 / HUGE else "above 0", words)
    return words.replace(" or ", ", or ") if ", " in words else words


def _default(row: Field[Any] | None) -> str:
    """A key's value where nothing sets it, as text; "required" where it must be set."""
    if row is None:
        return "none"
    if row.default is MISSING and row.default_factory is MISSING:
        return REQUIRED
    value = row.default if row.default_factory is MISSING else row.default_factory()
    return f"{value:g}" if isinstance(value, float) else value_text(value)
