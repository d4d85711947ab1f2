"""A run with some keys changed, named by their dotted paths."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from .read import value_text
from .run import Run

Section = TypeVar("Section")
Change = tuple[tuple[str, object], ...]  # (key, value) pairs, set together


def with_changes(run: Run, change: Iterable[tuple[str, object]]) -> Run:
    """Return the run with the keys of a change set."""
    for key, value in change:
        run = _set(run, key.split("."), value)
    return run


def with_values(section: Section, **values: Any) -> Section:
    """As dataclasses.replace, without a call of `__init__`, which takes most of its time: a search changes layouts by the hundred thousand.
    For the sections of a run, whose classes compute nothing and have no slots."""
    assert values.keys() <= section.__dict__.keys(), values
    copy = object.__new__(type(section))
    copy.__dict__.update(section.__dict__, **values)
    return copy


def _set(part: Section, path: list[str], value: object) -> Section:
    name, *rest = path
    new: Any = _set(getattr(part, name), rest, value) if rest else value
    return replace(part, **{name: new})  # type: ignore[type-var]


def overrides(change: Iterable[tuple[str, object]]) -> tuple[str, ...]:
    """Return a change as command-line overrides."""
    return tuple(f"{key}={value_text(value)}" for key, value in change)
