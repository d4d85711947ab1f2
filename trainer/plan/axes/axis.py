"""What a mesh axis is to the planner: the logical dims that it splits."""

from __future__ import annotations

from dataclasses import dataclass

from ...models.table import Dims


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis splits the first of `splits` that a tensor has; where it has none, the first of `otherwise`."""

    name: str
    splits: Dims
    otherwise: Dims = ()

    def split(self, dims: Dims) -> str | None:
        """The dim of a tensor that this axis splits; None where each of its ranks holds all of it."""
        for dim in dims:
            if dim in self.splits:
                return dim
        for dim in dims:
            if dim in self.otherwise:
                return dim
        return None
