"""A run with some keys changed, named by their dotted paths."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from ..spec.read import shown
from ..spec.run import Run

Part = TypeVar("Part")
Change = tuple[tuple[str, object], ...]  # (key, value) pairs that are set together


def changed(run: Run, change: Iterable[tuple[str, object]]) -> Run:
    """The run with every (key, value) of a change set."""
    for key, value in change:
        run = _set(run, key.split("."), value)
    return run


def _set(part: Part, path: list[str], value: object) -> Part:
    name, *rest = path
    new: Any = _set(getattr(part, name), rest, value) if rest else value
    return replace(part, **{name: new})  # type: ignore[type-var]


def words(change: Iterable[tuple[str, object]]) -> tuple[str, ...]:
    """A change as overrides of the command line."""
    return tuple(f"{key}={shown(value)}" for key, value in change)
