"""Reads a `Run` from a plain mapping strictly, and reports every problem at once."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from .keys.units import unit_of
from .numbers.bounded import LEAST_FLOAT, MOST, MOST_FLOAT, MOST_LAYERS
from .numbers.quantity import count_readings, dimension_of, parse_quantity, suggest_quantity
from .problem import Problem, Unreadable, no_key_problem, plain_characters, suggest_name
from .run import Run

Part = TypeVar("Part")


def read_run(config: Mapping[str, Any]) -> Run:
    """Return the `Run` of a composed config; raises Unreadable with every problem."""
    return read(config, Run)


def read(config: Mapping[str, Any], into: type[Part], at: str = "") -> Part:
    """Convert a mapping to a frozen data class; `at` prefixes its keys in messages. Raises Unreadable with every problem."""
    problems: list[Problem] = []
    part = _section(config, into, at, problems)
    if problems:
        raise Unreadable(problems)
    assert part is not None
    return part


def accepts(key: str, value: Any) -> bool:
    """Whether the key of a run takes a value, which may be text from a command line; true for what is no key, such as a group."""
    hint: Any = Run
    for name in key.split("."):
        section = next((kind for kind in _choices(hint) if is_dataclass(kind)), None)
        hint = _key_types(section).get(name) if section else None
    if hint is None or any(is_dataclass(kind) for kind in _choices(hint)):
        return True
    problems: list[Problem] = []
    _value(_plain(value), hint, key, problems)
    return not problems


def _plain(value: Any) -> Any:
    """Return the number or truth that a text of a command line stands for; anything else as it is."""
    if isinstance(value, str) and re.match(r"[-+.]?[.\d]", value):
        with suppress(ValueError):
            return float(value)
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def _section(config: Mapping[str, Any], into: type[Part], at: str, problems: list[Problem]) -> Part | None:
    before = len(problems)
    hints = _key_types(into)
    for key in config:
        if key not in hints:
            problems.append(no_key_problem(f"{at}{key}", suggest_name(str(key), hints, at)))
    read: dict[str, Any] = {}
    for row in fields(into):  # type: ignore[arg-type]
        if row.name in config:
            read[row.name] = _value(config[row.name], hints[row.name], f"{at}{row.name}", problems)
        elif row.default is MISSING and row.default_factory is MISSING:
            problems.append(Problem(rule="missing", says=f"{at}{row.name} is not set", mend=type_text(hints[row.name])))
    return into(**read) if len(problems) == before else None


# The type of each key of a section, whose annotations are evaluated once.
_key_types: Callable[[Any], Mapping[str, Any]] = cache(partial(get_type_hints, include_extras=True))


def _value(value: Any, hint: Any, key: str, problems: list[Problem]) -> Any:
    nested = next((kind for kind in _choices(hint) if is_dataclass(kind)), None)
    if isinstance(nested, type) and isinstance(value, Mapping):
        return _section(value, nested, f"{key}.", problems)
    if get_origin(hint) is dict and isinstance(value, Mapping) and (names := _allowed_names(hint)):
        return _mapping(value, hint, names, key, problems)
    if _is_list(value) and (kind := _listed_section(hint)):
        return tuple([_listed(each, kind, f"{key}[{number}]", problems) for number, each in enumerate(value)])
    if isinstance(value, str) and value not in _allowed_names(hint) and (of := dimension_of(key)):
        parsed = parse_quantity(value, of)
        if parsed is None:
            problems.append(Problem(rule="unit", says=f"{key}={value} is not a {of.noun}", mend=suggest_quantity(value, of)))
            return None
        value = parsed
    if _is_list(value) and len(value) != len(set(map(repr, value))) and "Literal" in repr(hint) and not _may_repeat(hint):
        problems.append(Problem(rule="twice", says=f"{key}={value_text(value)} names something twice"))
        return None
    if why := _why_not_text(value):
        problems.append(Problem(rule="type", says=f"{key}={value_text(value)} {why}"))
        return None
    try:
        if not _is_finite(value):
            raise msgspec.ValidationError("not a finite number")
        return msgspec.convert(_as_integers(value), hint)
    except msgspec.ValidationError:
        inside = list(_item_problems(value, hint, key)) if isinstance(value, Mapping) else []
        found = _range_problem(value, hint, key) or _quotes_problem(value, hint, key) or _suffix_problem(value, hint, key)
        problems += inside or [found or _type_problem(value, hint, key)]
        return None


def _listed_section(hint: Any) -> Any:
    """Return the data class of which a key takes a list; None for any other key."""
    return next((get_args(kind)[0] for kind in _choices(hint) if get_origin(kind) is tuple and is_dataclass(get_args(kind)[0])), None)


def _listed(value: Any, kind: Any, key: str, problems: list[Problem]) -> Any:
    """Read one section of a list."""
    if isinstance(value, Mapping):
        return _section(value, kind, f"{key}.", problems)
    problems.append(_type_problem(value, kind, key))
    return None


def _item_problems(value: Mapping[Any, Any], hint: Any, key: str) -> Iterator[Problem]:
    """Yield the problems of the values of a mapping whose keys are the user's own names."""
    kind = next((get_args(each)[1] for each in _choices(hint) if get_origin(each) is dict), None)
    for name, each in value.items() if kind is not None else ():
        found: list[Problem] = []
        if isinstance(name, str):
            _value(each, kind, f"{key}.{name}", found)
        else:
            found.append(Problem(rule="type", says=f"{key}: {name} is not a name", mend="begin it with a letter"))
        yield from found


def _mapping(value: Mapping[Any, Any], hint: Any, names: list[str], key: str, problems: list[Problem]) -> dict[str, Any]:
    """Read a mapping with fixed keys."""
    for name in value:
        if name not in names:
            problems.append(no_key_problem(f"{key}.{name}", suggest_name(str(name), names)))
    kind = get_args(hint)[1]
    return {name: _value(each, kind, f"{key}.{name}", problems) for name, each in value.items() if name in names}


def _allowed_names(hint: Any) -> list[str]:
    """Return the literal values that a value, or each key of a mapping, may have."""
    if get_origin(hint) is dict:
        return _allowed_names(get_args(hint)[0])
    return [str(name) for kind in _choices(hint) if get_origin(kind) is Literal for name in get_args(kind)]


def _type_problem(value: Any, hint: Any, key: str) -> Problem:
    of = dimension_of(key)
    unit = of.unit if of else unit_of(key) if isinstance(value, str) and value[:1].isdigit() else ""
    says = f"{key}={value_text(value)} is not {type_text(hint)}{f' ({unit})' if unit else ''}"
    return Problem(rule="type", says=says, mend=_hint(value, hint, key))


def _suffix_problem(value: Any, hint: Any, key: str) -> Problem | None:
    """Return the problem of a count with a suffix, such as 4k; None for any other value."""
    numbers = any(kind in (int, float) or (get_args(kind) or (None,))[0] in (int, float) for kind in _choices(hint))
    if not isinstance(value, str) or not numbers or not (readings := count_readings(value)):
        return None
    return Problem(rule="type", says=f"{key}={value} is not a number", mend=f"write {' or '.join(readings)}")


def _quotes_problem(value: Any, hint: Any, key: str) -> Problem | None:
    """Return the problem of a number in quotes; None for any other value."""
    if not isinstance(value, str) or not _NUMBER.fullmatch(value) or not _accepts(float(value), hint):
        return None
    return Problem(rule="type", says=f"{key}='{value}' is text, not {type_text(hint)}", mend="leave the quotes out")


def _range_problem(value: Any, hint: Any, key: str) -> Problem | None:
    """Return the problem of a number that is too large or too small to compute with; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value) or value <= 0:
        return None
    metas = [meta for kind in _choices(hint) for meta in get_args(kind)[1:] if isinstance(meta, msgspec.Meta)]
    for meta in metas:
        if meta.le in FAR and value > meta.le:
            return Problem(rule="type", says=f"{key}={value_text(value)} is too large", mend=f"at most {_power(meta.le)}")
        if meta.ge == LEAST_FLOAT and value < meta.ge:
            return Problem(rule="type", says=f"{key}={value_text(value)} is too small", mend=f"at least {meta.ge:g}")
    return None


def _power(bound: float) -> str:
    """Return a bound with one digit: 1e18."""
    return re.sub(r"e\+0*", "e", f"{bound:.0e}")


def _may_repeat(hint: Any) -> bool:
    """Whether a list may name something twice: its type says so in `extra` of its Meta."""
    metas = [meta for kind in _choices(hint) for meta in get_args(kind)[1:] if isinstance(meta, msgspec.Meta)]
    return any(meta.extra and meta.extra.get("repeats") for meta in metas)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _why_not_text(value: Any) -> str:
    """Return why a value, or one inside it, is not valid text; "" if it is."""
    if isinstance(value, str):
        return "contains NUL" if "\0" in value else "is not valid UTF-8" if any("\ud800" <= each <= "\udfff" for each in value) else ""
    inside = [*value, *value.values()] if isinstance(value, Mapping) else value if _is_list(value) else ()
    return next((why for each in inside if (why := _why_not_text(each))), "")


def _as_integers(value: Any) -> Any:
    """Return integral floats as integers: YAML reads 1e6 as a float."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return [_as_integers(each) for each in value] if _is_list(value) else value


def _choices(hint: Any) -> Iterator[Any]:
    if get_origin(hint) in (Union, types.UnionType):
        for each in get_args(hint):
            yield from _choices(each)
    else:
        yield hint


def _hint(value: Any, hint: Any, key: str) -> str:
    """Return a hint for a value of the wrong type; "" if there is none."""
    if isinstance(value, str) and (plain := plain_characters(value)) != value and _accepts(_plain(plain), hint):
        return f"write {key}={plain}"
    if hint is bool and (truth := _TRUTH.get(str(value).lower())):
        return f"write {truth}"
    kinds = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in _choices(hint)]
    list_kind = next((kind for kind in kinds if get_origin(kind) is tuple), None)
    if list_kind is not None and isinstance(value, str) and not _is_list(value) and value in _allowed_names(get_args(list_kind)[0]):
        kept = _KEPT.get(key, "")
        return f"write {key}=[{value if value in kept else kept + value}]"
    if list_kind is not None and isinstance(value, str) and value and _accepts(value, get_args(list_kind)[0]):
        return f"write {key}=[{value}]"
    if list_kind is not None and _is_list(value):
        unknown = [each for each in value if isinstance(each, str) and each not in _allowed_names(get_args(list_kind)[0])]
        return _hint(unknown[0], get_args(list_kind)[0], key) if unknown else ""
    own_names = next((get_args(kind)[1] for kind in kinds if get_origin(kind) is dict and get_args(kind)[0] is str), None)
    if own_names is not None and value is not None and _accepts(value, own_names):
        return f"write {key}.NAME={value_text(value)}"
    section = next((kind for kind in kinds if is_dataclass(kind)), None)
    if section is not None and not isinstance(value, Mapping | list | None):
        accepting = [row.name for row in fields(section) if _accepts(value, _key_types(section)[row.name])]
        return f"set one of its keys, as {key}.{accepting[0]}={value_text(value)}" if accepting else ""
    names = _allowed_names(hint)
    close = suggest_name(value, names) if isinstance(value, str) and names else ""
    return close if close.startswith("did") else ""


def _accepts(value: Any, hint: Any) -> bool:
    try:
        msgspec.convert(_as_integers(value), hint)
    except msgspec.ValidationError:
        return False
    return True


_NUMBER = re.compile(r"[-+]?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_KEPT = {"log.sinks": "console,jsonl,"}  # what a list keeps beside a name that is added
_TRUTH = {**dict.fromkeys(("yes", "on", "1", "y", "t"), "true"), **dict.fromkeys(("no", "off", "0", "n", "f"), "false")}
_NOUNS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null", dict: "a mapping"}
_BOUNDS = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
FAR = (MOST, 2**63 - 1, MOST_FLOAT, MOST_LAYERS)  # bounds that messages leave out


def type_text(hint: Any) -> str:
    """Return a type as text: `a whole number, at least 1`."""
    return " or ".join(_noun(kind) for kind in _choices(hint) if kind is not type(None))


def _noun(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        metas = [each for each in args[1:] if isinstance(each, msgspec.Meta)]
        bounds = [_bound(getattr(meta, name), text) for meta in metas for name, text in _BOUNDS]
        return _noun(args[0]) + "".join(bounds)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}" if len(args) > 1 else str(args[0])
    if origin is tuple:
        each = args[0]
        if args[-1] is not Ellipsis:
            return f"a list of {len(args)}, each {_noun(each)}"
        return "a list of text" if each is str else f"a list, each {_noun(each)}"
    if is_dataclass(kind):
        return f"a mapping of {', '.join(row.name for row in fields(kind))}"
    return _NOUNS.get(origin or kind, str(kind))


def _bound(value: float | None, text: str) -> str:
    if value is None or value in FAR:
        return ""
    return ", above 0" if value == LEAST_FLOAT else f", {text} {value:g}"


def value_text(value: Any) -> str:
    """Return a value as the user would write it on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if _is_list(value):
        return f"[{','.join(map(value_text, value))}]"
    if is_dataclass(value):
        return value_text({row.name: _shorten(each) for row in fields(value) if (each := getattr(value, row.name)) != row.default})
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{value_text(each)}" for key, each in value.items()) + "}"
    return str(value)


def _shorten(value: Any) -> Any:
    """Return a value of a section with whole numbers as a user writes them, not as floats: 12000, 2e12."""
    if _is_list(value):
        return [_shorten(each) for each in value]
    return f"{value:.12g}".replace("e+", "e") if isinstance(value, float) and value.is_integer() else value
