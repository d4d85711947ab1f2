"""The process groups of a rank's seat on the mesh; an axis of one rank has none."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from ..layers.group import Group
from ..plan.mesh import Mesh
from ..plan.mesh_position import Seat
from .world import WAIT, World

__all__ = ["Grid", "Group", "grid"]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """This rank on the mesh, and its groups by axis.

    `tp`, `cp`, `dp`, `pp` are the mesh's own. `data` is dp x cp, the ranks over which gradients add up and ZeRO shards: those of `dp`
    where cp has one rank. `model` joins the ranks that make up one replica of the model, `copies` the
    tensor-parallel ranks that hold the same key and value heads, `ends` the first and the last stage, which share a tied weight.
    `ep` are neighbours along `dp` that share out the experts, `expert_copies` those that hold the same ones.
    """

    world: World
    seat: Seat
    groups: dict[str, Group]
    alone: dist.ProcessGroup | None  # of this rank only, for those who ask for a group where the axis has none

    def group(self, axis: str) -> Group | None:
        """The group along an axis; None where it has one rank."""
        return self.groups.get(axis)

    def size(self, axis: str) -> int:
        return self.groups[axis].size if axis in self.groups else 1

    def place(self, axis: str) -> int:
        """This rank's number along an axis."""
        return self.groups[axis].rank if axis in self.groups else 0


def grid(world: World, seat: Seat, *, copies: int = 1) -> Grid:
    """Make the groups, on all ranks at once; `copies` neighbours along the tensor axis share key and value heads."""
    made: dict[str, Group] = {}
    for axis, ranks in _rows(seat, copies):
        if len(ranks[0]) == 1:
            continue
        for members in ranks:
            handle = dist.new_group(list(members), timeout=WAIT)  # even of all ranks: what travels on an axis is told apart by its group
            if world.rank in members:
                made[axis] = Group(axis=axis, ranks=members, rank=members.index(world.rank), handle=handle)
    if seat.mesh.cp == 1 and "dp" in made:
        made["data"] = made["dp"]
    return Grid(world=world, seat=seat, groups=made, alone=_alone(world) if {"ep", "tp"} & made.keys() else None)


def _alone(world: World) -> dist.ProcessGroup:
    own: list[dist.ProcessGroup] = [dist.new_group([rank], timeout=WAIT) for rank in range(world.size)]
    return own[world.rank]


def _rows(seat: Seat, copies: int) -> list[tuple[str, list[tuple[int, ...]]]]:
    """(axis, every group of it)."""
    mesh = seat.mesh
    rows = [(axis, list(mesh.groups(axis))) for axis in ("tp", "cp", "dp", "pp")]
    if mesh.cp > 1:
        rows.append(("data", list(mesh.groups("data"))))
    rows.append(("model", [_replica(mesh, dp, cp) for dp in range(mesh.dp) for cp in range(mesh.cp)]))
    rows.append(("copies", [group[at : at + copies] for group in mesh.groups("tp") for at in range(0, mesh.tp, copies)]))
    if mesh.ep > 1:
        rows += [("ep", list(mesh.groups("ep"))), ("expert_copies", list(mesh.groups("copies")))]
    rows.append(("ends", [(group[0], group[-1]) for group in mesh.groups("pp")] if mesh.pp > 1 else [(0,)]))
    return rows


def _replica(mesh: Mesh, dp: int, cp: int) -> tuple[int, ...]:
    """The ranks that hold each element of the model once."""
    return tuple(mesh.rank(dp=dp, cp=cp, pp=pp, tp=tp) for pp in range(mesh.pp) for tp in range(mesh.tp))
