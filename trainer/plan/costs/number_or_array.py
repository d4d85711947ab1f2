"""Numbers of one split of a model's blocks, or arrays with an element for each of many splits: the same formulas cost both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Number = TypeVar("Number", int, float)


def larger(one: Number, other: Number) -> Number:
    """The larger of two finite numbers; of arrays, element by element."""
    return one * (one >= other) + other * (one < other)


def is_number(value: Any) -> bool:
    """Whether a value belongs to one split alone."""
    return isinstance(value, int | float)


def for_each(function: Callable[[int], int], value: int) -> int:
    """A function of a number; of an array, computed once for each number in it."""
    if is_number(value):
        return function(value)
    import numpy

    numbers, places = numpy.unique(value, return_inverse=True)
    found: Any = numpy.array([function(int(each)) for each in numbers])[places]
    return found  # type: ignore[no-any-return]
