"""Descriptions of config keys for people: values, unit, default and meaning, from the data classes and `spec/keys/meanings.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ...trainer.spec.keys.meanings import KEYS
from ...trainer.spec.read import type_text, value_text
from ...trainer.spec.run import Run
from .keys import WRITTEN_KEYS

REQUIRED = "required"
HUGE = 1e15  # bounds from here on are not shown


@dataclass(frozen=True, kw_only=True)
class KeyHelp:
    """One key: `says` is its meaning, `takes` its type or choices, `default` its value in YAML or "required", `null` what null means."""

    key: str
    says: str
    unit: str
    takes: str
    choices: tuple[str, ...]
    default: str
    null: str


def key_help(name: str) -> list[KeyHelp]:
    """Return the help of a key, or of every key in a section; none for any other name."""
    prefix = f"{name}."
    return [_help(key, hint, row) for key, hint, row in key_fields() if (key == name or key.startswith(prefix)) and key not in WRITTEN_KEYS]


def key_fields(of: type = Run, at: str = "") -> Iterator[tuple[str, Any, Field[Any] | None]]:
    """Yield (key, type, field) of every key in the order of the data classes, including keys that distrain sets.

    A section that may be null, and a mapping with fixed keys, come before their own keys; keys of a mapping have no field.
    """
    hints = _type_hints(of)
    for row in fields(of):
        key, hint = f"{at}{row.name}", hints[row.name]
        section = next((kind for kind in (hint, *get_args(hint)) if is_dataclass(kind)), None)
        if section is None or section is not hint:
            yield key, hint, row
        if isinstance(section, type):
            yield from key_fields(section, f"{key}.")
        elif get_origin(hint) is dict and get_origin(get_args(hint)[0]) is Literal:
            yield from ((f"{key}.{name}", get_args(hint)[1], None) for name in get_args(get_args(hint)[0]))


@cache
def _type_hints(of: type) -> dict[str, Any]:
    """The types of a data class's fields, evaluated."""
    return get_type_hints(of, include_extras=True)


def sections() -> set[str]:
    """Return every section: the parts of keys before a dot."""
    return {key[:at] for key, _, _ in key_fields() for at, letter in enumerate(key) if letter == "."}


def key_choices(key: str, hint: Any) -> tuple[str, ...]:
    """Return the choices of a key, from its type or from the table that it is looked up in; none if it takes other values."""
    if key == "model.family":
        from ...trainer.models.families import FAMILIES

        return tuple(FAMILIES)
    if key == "parallel.schedule":
        from ...trainer.plan.layout.schedules import SCHEDULES

        return tuple(SCHEDULES)
    if key == "engine":
        from ...trainer.plan.engines import ENGINES, PAPERS_NAME

        return ("auto", *ENGINES, PAPERS_NAME)
    return tuple(map(str, get_args(hint))) if get_origin(hint) is Literal else ()


def key_comments() -> dict[str, str]:
    """Return a comment for every key: its meaning, unit and choices."""
    comments = {}
    for key, hint, _ in key_fields():
        choices, row = key_choices(key, hint), KEYS[key]
        unit, null = f" ({row.unit})" if row.unit else "", f"; null: {row.null}" if row.null else ""
        comments[key] = row.says + unit + (f"; {', '.join(choices)}" if choices else "") + null
    return comments


def help_json(rows: list[KeyHelp]) -> list[dict[str, Any]]:
    """Return keys as plain data."""
    return [asdict(row) for row in rows]


def _help(key: str, hint: Any, row: Field[Any] | None) -> KeyHelp:
    choices, description = key_choices(key, hint), KEYS[key]
    takes = f"one of {', '.join(choices)}" if choices else type_summary(hint)
    default = family_defaults(key) or _default(row)
    return KeyHelp(
        key=key, says=description.says, unit=description.unit, takes=takes, choices=choices, default=default, null=description.null
    )


def family_defaults(key: str) -> str:
    """Return the defaults of a key that depends on the family, as "by family: gpt layernorm, ..."; "" for any other key."""
    from ...trainer.models.families import FAMILIES

    name = key.removeprefix("model.")
    defaults = {family: value_text(row.defaults[name]) for family, row in FAMILIES.items() if name in row.defaults and key != name}
    return f"by family: {', '.join(f'{family} {value}' for family, value in defaults.items())}" if defaults else ""


def type_summary(hint: Any) -> str:
    """Return a type in words: "a number, at least 0, or auto". Bounds that only keep products of numbers finite are left out."""
    text = re.sub(r", at most (\S+e\+\d+)", lambda bound: bound[0] if float(bound[1]) < HUGE else "", type_text(hint))
    text = re.sub(r"at least (\S+e-\d+)", lambda bound: bound[0] if float(bound[1]) > 1 / HUGE else "above 0", text)
    return text.replace(" or ", ", or ") if ", " in text else text


def _default(row: Field[Any] | None) -> str:
    """Return the default of a key as text; "required" if it must be set."""
    if row is None:
        return "none"
    if row.default is MISSING and row.default_factory is MISSING:
        return REQUIRED
    value = row.default if row.default_factory is MISSING else row.default_factory()
    return f"{value:g}" if isinstance(value, float) else value_text(value)
