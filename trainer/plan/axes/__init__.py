"""The mesh axes: one module and one row each.

The rows are in mesh order, outermost first: neighbouring ranks differ on the last axis. Everything that depends on the axes reads this
table: the mesh, the costs of a block, traffic, process groups.
"""

from __future__ import annotations

from . import cp, dp, ep, pp, tp
from .axis import Axis

AXES: dict[str, Axis] = {
    "pp": pp.AXIS,
    "dp": dp.AXIS,
    "cp": cp.AXIS,
    "ep": ep.AXIS,
    "tp": tp.AXIS,
}

__all__ = ["AXES", "Axis"]
