"""The mesh axes: one module and one row each.

The rows are in mesh order, outermost first: neighbouring ranks differ on the last axis. Everything that depends on the axes reads this
table: the mesh, the costs of a block, traffic, process groups.
"""

from __future__ import annotations

from dataclasses import fields

from ...spec.run import Parallel
from . import cp, dp, ep, pp, tp
from .axis import Axis

AXES: dict[str, Axis] = {
    "pp": pp.AXIS,
    "dp": dp.AXIS,
    "cp": cp.AXIS,
    "ep": ep.AXIS,
    "tp": tp.AXIS,
}

__all__ = ["AXES", "Axis", "degree_keys"]


def degree_keys(parallel: Parallel) -> tuple[str, ...]:
    """The keys of `parallel` that are degrees of axes, in the order of its fields."""
    return tuple(field.name for field in fields(parallel) if field.name in AXES)
