"""A random value of a config key, from its type in the schema: choices, bounds and null."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from random import Random
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta

from ...trainer.spec.run import Run

INTEGERS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)  # that a tiny run can have
FLOATS = (0.0, 1e-3, 0.01, 0.1, 0.25, 0.5, 0.9, 1.0, 1.5, 2.0, 4.0)
LARGEST = 512  # a present value that is not larger is halved, doubled and so on too
NULL_SHARE = 0.25  # of the draws of a key that may be null
LONGEST_LIST = 3

NO_VALUE = object()  # of a key whose type is text: a file, a folder, a name


def leaf_keys(of: Any = Run, at: str = "") -> dict[str, Any]:
    """Return the type of every key below a section of the schema, by its dotted name."""
    hints, found = get_type_hints(of, include_extras=True), dict[str, Any]()
    for row in fields(of):
        section = next((kind for kind in (hints[row.name], *get_args(hints[row.name])) if is_dataclass(kind)), None)
        found |= leaf_keys(section, f"{at}{row.name}.") if section else {f"{at}{row.name}": hints[row.name]}
    return found


def drawn_value(hint: Any, now: object, random: Random) -> Any:
    """Draw a value of a type; `now` is the present one, of which numbers take multiples. NO_VALUE for text."""
    bounds, hint = _bounds(hint)
    kinds = [each for each in get_args(hint) if each is not NoneType]
    if NoneType in get_args(hint) and random.random() < NULL_SHARE:
        return None
    if get_origin(hint) is Literal:
        return random.choice(kinds)
    if get_origin(hint) is tuple:
        item = kinds[0]
        many = random.randint(1, LONGEST_LIST) if Ellipsis in kinds else len(kinds)
        values = tuple(drawn_value(item, None, random) for _ in range(many))
        return NO_VALUE if NO_VALUE in values else values
    if kinds:  # one of several types
        return drawn_value(random.choice(kinds), now, random)
    if hint is bool:
        return random.random() < 0.5
    if hint in (int, float):
        allowed = [each for each in _numbers(hint, now) if _is_within(each, bounds)]
        return random.choice(allowed)
    return NO_VALUE


def _bounds(hint: Any) -> tuple[Meta | None, Any]:
    """The bounds of a type, and the type without them."""
    meta = next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Meta)), None)
    return (meta, hint.__origin__) if hasattr(hint, "__metadata__") else (None, hint)


def _numbers(kind: Any, now: object) -> list[Any]:
    """The numbers of a kind that are tried: small ones, and multiples of the present value."""
    numbers: list[Any] = list(INTEGERS if kind is int else FLOATS)
    if isinstance(now, int | float) and not isinstance(now, bool) and 0 < now <= LARGEST:
        numbers += [kind(now * factor) for factor in (0.5, 0.75, 1.5, 2)]
    return numbers


def _is_within(number: float, bounds: Meta | None) -> bool:
    if bounds is None:
        return True
    least, most, above, below = bounds.ge, bounds.le, bounds.gt, bounds.lt
    return (
        (least is None or number >= least)
        and (most is None or number <= most)
        and (above is None or number > above)
        and (below is None or number < below)
    )
