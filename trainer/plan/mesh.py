"""Ranks laid out on the mesh: pp outermost, then dp (its expert ranks inside), cp, tp innermost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, inf, prod
from typing import NamedTuple

from ..spec.run import Cluster, Link
from .collectives import Wire

Run = tuple[int, int]  # (size, stride): so many ranks, each so many after the last
Runs = tuple[Run, ...]

AXES = ("pp", "dp", "cp", "tp")  # outermost first; ep is the inner part of dp, `data` is dp x cp


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The degrees of the axes. Expert ranks are taken from the data axis: ep divides dp, and world = pp dp cp tp."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's place on every axis."""
        found: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return {axis: found[axis] for axis in AXES}

    def rank(self, **place: int) -> int:
        """The rank at a place; axes not named are at 0."""
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + place.get(axis, 0)
        return rank

    def strides(self, axis: str) -> Runs:
        """The runs of ranks that an axis's group is made of, innermost first.

        `ep` is the inner part of dp, `copies` the outer: ranks that hold the same experts. `data` is dp x cp: the ranks
        over which gradients add up and ZeRO shards.
        """
        inner = self.tp * self.cp
        rows: dict[str, Runs] = {
            "tp":     ((self.tp, 1),),
            "cp":     ((self.cp, self.tp),),
            "dp":     ((self.dp, inner),),
            "data":   ((self.cp, self.tp), (self.dp, inner)),
            "ep":     ((self.ep, inner),),
            "copies": ((self.cp, self.tp), (self.dp // self.ep, inner * self.ep)),
            "pp":     ((self.pp, inner * self.dp),),
        }  # fmt: skip
        return rows[axis]

    def members(self, axis: str, first: int = 0) -> tuple[int, ...]:
        """The ranks of the axis's group that begins at rank `first`."""
        ranks: tuple[int, ...] = (first,)
        for size, stride in self.strides(axis):
            ranks = tuple(rank + step * stride for step in range(size) for rank in ranks)
        return ranks

    def groups(self, axis: str) -> Iterator[tuple[int, ...]]:
        """Every group of an axis; together they hold each rank once."""
        seen: set[int] = set()
        for rank in range(self.world):
            if rank not in seen:
                group = self.members(axis, rank)
                seen.update(group)
                yield group

    def size(self, axis: str) -> int:
        """Ranks in a group of an axis."""
        return prod(size for size, _ in self.strides(axis))

    def in_node(self, axis: str, gpus: int) -> int:
        """The fewest ranks that a group of an axis has in any node that it touches, nodes being `gpus` ranks each.

        1 where its neighbours never share a node; the group's size where it stays inside one.
        """
        runs = _joined(self.strides(axis))
        if len(runs) <= 1:
            return _fewest(runs, gpus)
        held = together(runs, gpus)
        return self._counted(axis, gpus) if held is None else held

    def _counted(self, axis: str, gpus: int) -> int:
        """in_node by looking at every group: for meshes that don't sit on the borders of nodes."""
        least = self.size(axis)
        for group in self.groups(axis):
            nodes = [rank // gpus for rank in group]
            least = min(least, *(nodes.count(node) for node in set(nodes)))
        return least


def _joined(runs: Runs) -> Runs:
    """The same ranks as the fewest runs: one that goes on where the one inside it ends is part of it."""
    joined = list[Run]()
    for size, stride in runs:
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = (joined[-1][0] * size, joined[-1][1])
        elif size > 1:
            joined.append((size, stride))
    return tuple(joined)


def _fewest(runs: Runs, gpus: int) -> int:
    """The fewest ranks that a group of one run has in a node that it touches, of all groups of a mesh that fills its nodes.

    Borders of nodes fall on every multiple of gcd(gpus, size x stride) inside some group, the first of them cuts off the fewest.
    """
    if not runs:
        return 1
    ((size, stride),) = runs
    return max(1, gcd(gpus, size * stride) // stride)


def together(runs: Runs, gpus: int) -> int | None:
    """Ranks of a group of such runs that share a node; None where the runs don't sit on the borders of nodes."""
    held = 1
    for size, stride in runs:
        reach = size * stride
        if gpus % reach == 0:
            held *= size
        elif gpus % stride == 0 and reach % gpus == 0:
            held *= gpus // stride
        elif stride % gpus and size > 1:
            return None
    return held


def inner(runs: Runs, ranks: int) -> tuple[Runs, Runs]:
    """The innermost so many ranks of a group's runs, and the runs that join its copies; the ranks divide the group's."""
    near, far = list[Run](), list[Run]()
    for size, stride in runs:
        taken = gcd(size, ranks)
        ranks //= taken
        near.append((taken, stride))
        far.append((size // taken, stride * taken))
    return tuple(near), tuple(far)


class Wires(NamedTuple):
    """How the groups of each axis are wired, `pair` being two neighbouring stages."""

    tp: Wire
    cp: Wire
    ep: Wire
    data: Wire
    copies: Wire
    pair: Wire
    known: bool  # whether every link that the mesh uses is stated


def wires(mesh: Mesh, cluster: Cluster) -> Wires:
    """The wires of a mesh on a cluster."""
    inside, between, gpus = cluster.inside, cluster.between, cluster.gpus
    rows = {axis: wired(mesh.size(axis), mesh.in_node(axis, gpus), inside, between) for axis in ("tp", "cp", "ep", "data", "copies")}
    stages = min(2, mesh.pp)
    together = mesh.in_node("pp", gpus) == mesh.pp
    rows["pair"] = wired(stages, stages if together else 1, inside, between)
    return Wires(**rows, known=all(wire.known for wire in rows.values()))


def wired(size: int, in_node: int, inside: Link | None, between: Link | None) -> Wire:
    """A group of `size` ranks, `in_node` of them in each node (arXiv:2104.04473 section 5.9 counts rails the same way)."""
    if size == 1:
        return Wire(size, in_node, inf, 0.0)
    if size <= in_node:
        return Wire(size, in_node, inside.rate, inside.latency) if inside else Wire(size, in_node, inf, 0.0, known=False)
    if between is None or (in_node > 1 and inside is None):
        return Wire(size, in_node, inf, 0.0, known=False)
    rate, hop = between.rate * in_node, between.latency
    if inside is not None and in_node > 1:
        rate, hop = min(inside.rate, rate), (between.latency + (in_node - 1) * inside.latency) / in_node
    return Wire(size, in_node, rate, hop)
