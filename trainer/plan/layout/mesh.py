"""The mesh: which rank is where on the axes, which ranks form each group, and how groups lie on the nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd, inf, prod

from ...spec.run import Cluster, Parallel
from ..axes import AXES, Axis
from ..axes.collectives import Wire

RankStride = tuple[int, int]  # (size, stride): `size` ranks, each `stride` after the one before
RankStrides = tuple[RankStride, ...]


def mesh_order() -> tuple[str, ...]:
    """The axes that are not within another, outermost first. Their degrees multiply to the world size."""
    return _mesh_order(tuple(AXES.values()))


@cache
def _mesh_order(axes: tuple[Axis, ...]) -> tuple[str, ...]:
    return tuple(axis.name for axis in axes if axis.within is None)


@cache
def _replica_axes(axes: tuple[Axis, ...]) -> tuple[str, ...]:
    return tuple(name for name in reversed(_mesh_order(axes)) if name != "dp")


def replica_degrees(parallel: Parallel) -> dict[str, int]:
    """The degrees of all axes of the mesh order but dp, innermost first."""
    return {name: getattr(parallel, name) for name in _replica_axes(tuple(AXES.values()))}


def replica_size(parallel: Parallel) -> int:
    """The ranks of one replica: the product of its degrees."""
    size = 1
    for name in _replica_axes(tuple(AXES.values())):
        size *= getattr(parallel, name)
    return size


class Mesh:
    """The degree of every axis of `AXES`; an axis that is not named has degree 1.

    An axis within another takes the inner part of its ranks: ep divides dp, and world = pp dp cp tp.
    """

    __slots__ = ("_hash", "_strides", "cp", "degrees", "dp", "ep", "pp", "tp")

    def __init__(self, **degrees: int) -> None:
        if unknown := degrees.keys() - AXES.keys():
            raise TypeError(f"no mesh axis is named {', '.join(sorted(unknown))}")
        self.degrees: Mapping[str, int] = {name: degrees.get(name, 1) for name in AXES}
        self.pp, self.dp, self.cp, self.ep, self.tp = (self.degrees[name] for name in ("pp", "dp", "cp", "ep", "tp"))
        self._hash = hash(tuple(self.degrees.values()))
        self._strides: dict[str, RankStrides] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self.degrees == other.degrees

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={degree}' for name, degree in self.degrees.items())})"

    @property
    def world(self) -> int:
        return prod(self.degrees[axis] for axis in mesh_order())

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's coordinate on every axis of the mesh order."""
        order = mesh_order()
        found: dict[str, int] = {}
        for axis in reversed(order):
            rank, found[axis] = divmod(rank, self.degrees[axis])
        return {axis: found[axis] for axis in order}

    def rank(self, **coordinates: int) -> int:
        """The rank at these coordinates; an axis that is not named is at 0."""
        rank = 0
        for axis in mesh_order():
            rank = rank * self.degrees[axis] + coordinates.get(axis, 0)
        return rank

    def data_rank(self, coordinates: Mapping[str, int]) -> int:
        """A rank's number in its `data` group."""
        rank = 0
        for axis in mesh_order():
            if AXES[axis].data:
                rank = rank * self.degrees[axis] + coordinates[axis]
        return rank

    def strides(self, group: str) -> RankStrides:
        """The strides that a group is made of, innermost first.

        A group is that of an axis, or `data`: the ranks over which gradients are summed and ZeRO shards (dp x cp), or `expert_copies`:
        those of them that hold the same experts.
        """
        found = self._strides.get(group)
        if found is None:
            found = self._strides[group] = self._group_strides(group)
        return found

    def _group_strides(self, group: str) -> RankStrides:
        if group in AXES:
            return ((self.degrees[group], self._stride(AXES[group].within or group)),)
        if group not in ("data", "expert_copies"):
            raise KeyError(f"no group of ranks is named {group}")
        inner = self.degrees["ep"] if group == "expert_copies" else 1
        data = [axis for axis in reversed(mesh_order()) if AXES[axis].data]
        return tuple(
            (self.degrees[axis] // inner, self._stride(axis) * inner) if axis == "dp" else (self.degrees[axis], self._stride(axis))
            for axis in data
        )

    def _stride(self, axis: str) -> int:
        """Ranks from one coordinate of an axis to the next."""
        order = mesh_order()
        return prod(self.degrees[inner] for inner in order[order.index(axis) + 1 :])

    def members(self, group: str, first: int = 0) -> tuple[int, ...]:
        """The ranks of the group that begins at rank `first`."""
        return _strided_members(self.strides(group), first)

    def groups(self, group: str) -> Iterator[tuple[int, ...]]:
        """Every group of a kind; together they hold each rank once."""
        return self._strided_groups(self.strides(group))

    def sharding_groups(self, group: str, ranks: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Every group of the `ranks` ranks among which ZeRO shards what such a group shares, and every group of owners of one shard."""
        near, far = split_group(self.strides(group), ranks)
        return list(self._strided_groups(near)), list(self._strided_groups(far))

    def shard_rank(self, data: int, ranks: int, group: str = "data") -> int:
        """The number of a rank among those that it shards with, `ranks` of its group, from its number in that group."""
        place, reach = 0, 1
        for (size, _), (inner, _) in zip(self.strides(group), split_group(self.strides(group), ranks)[0], strict=True):
            data, digit = divmod(data, size)
            place, reach = place + digit % inner * reach, reach * inner
        return place

    def _strided_groups(self, strides: RankStrides) -> Iterator[tuple[int, ...]]:
        seen: set[int] = set()
        for rank in range(self.world):
            if rank not in seen:
                members = _strided_members(strides, rank)
                seen.update(members)
                yield members

    def size(self, group: str) -> int:
        """Ranks in a group."""
        return prod([size for size, _ in self.strides(group)])

    def in_node(self, group: str, gpus: int) -> int:
        """The fewest ranks that such a group has in any node that it touches, a node being `gpus` ranks.

        1 where its neighbours never share a node; the group's size where it stays inside one.
        """
        strides = _merge_strides(self.strides(group))
        if len(strides) <= 1:
            return _fewest_of_one_stride(strides, gpus)
        together = ranks_in_node(strides, gpus)
        return self._fewest_of_all_groups(group, gpus) if together is None else together

    def _fewest_of_all_groups(self, group: str, gpus: int) -> int:
        """`in_node` by enumeration, for meshes whose groups do not end where nodes end."""
        fewest = self.size(group)
        for members in self.groups(group):
            nodes = [rank // gpus for rank in members]
            fewest = min(fewest, *(nodes.count(node) for node in set(nodes)))
        return fewest


def _strided_members(strides: RankStrides, first: int) -> tuple[int, ...]:
    ranks: tuple[int, ...] = (first,)
    for size, stride in strides:
        ranks = tuple(rank + step * stride for step in range(size) for rank in ranks)
    return ranks


def _merge_strides(strides: RankStrides) -> RankStrides:
    """The same ranks in the fewest strides: one that continues where the one inside it ends is merged with it."""
    merged = list[RankStride]()
    for size, stride in strides:
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        elif size > 1:
            merged.append((size, stride))
    return tuple(merged)


def _fewest_of_one_stride(strides: RankStrides, gpus: int) -> int:
    """The fewest ranks that a group of one stride has in a node that it touches, over all groups of a mesh that fills its nodes.

    Node boundaries fall on every multiple of gcd(gpus, size x stride) inside some group; the first of them cuts off the fewest ranks.
    """
    if not strides:
        return 1
    ((size, stride),) = strides
    return max(1, gcd(gpus, size * stride) // stride)


def ranks_in_node(strides: RankStrides, gpus: int) -> int | None:
    """Ranks of a group that share a node of `gpus` ranks; None where its strides do not end at node boundaries."""
    together = 1
    for size, stride in strides:
        reach = size * stride
        if gpus % reach == 0:
            together *= size
        elif gpus % stride == 0 and reach % gpus == 0:
            together *= gpus // stride
        elif stride % gpus and size > 1:
            return None
    return together


def split_group(strides: RankStrides, ranks: int) -> tuple[RankStrides, RankStrides]:
    """The innermost `ranks` ranks of a group, and the strides that join their counterparts; `ranks` divides the group's size."""
    near, far = list[RankStride](), list[RankStride]()
    for size, stride in strides:
        inner = gcd(size, ranks)
        ranks //= inner
        near.append((inner, stride))
        far.append((size // inner, stride * inner))
    return tuple(near), tuple(far)


@dataclass(frozen=True, kw_only=True)
class Wires:
    """How the groups of a mesh are wired: of each axis that splits a block, `data`, `expert_copies`, and two neighbouring stages."""

    axes: Mapping[str, Wire]
    data: Wire
    expert_copies: Wire
    pair: Wire

    @cached_property
    def in_node(self) -> tuple[int, ...]:
        """The ranks of a group in one node, for each axis that splits a block."""
        return tuple(wire.in_node for wire in self.axes.values())

    @cached_property
    def are_known(self) -> bool:
        """Whether the cluster states every link that the mesh uses."""
        return all(wire.known for wire in (*self.axes.values(), self.data, self.expert_copies, self.pair))


def mesh_wires(mesh: Mesh, cluster: Cluster) -> Wires:
    """The wires of a mesh on a cluster."""
    gpus = cluster.gpus

    def wire(group: str) -> Wire:
        return group_wire(mesh.size(group), mesh.in_node(group, gpus), cluster)

    stages = min(2, mesh.pp)
    share_node = mesh.in_node("pp", gpus) == mesh.pp
    return Wires(
        axes={name: wire(name) for name, axis in AXES.items() if axis.messages},
        data=wire("data"),
        expert_copies=wire("expert_copies"),
        pair=group_wire(stages, stages if share_node else 1, cluster),
    )


def group_wire(size: int, in_node: int, cluster: Cluster) -> Wire:
    """The wire of a group of `size` ranks, `in_node` of them in each node (arXiv:2104.04473 section 5.9 counts rails the same way)."""
    inside, between, by_gloo = cluster.inside, cluster.between, cluster.device.kind == "cpu"
    if size == 1:
        return Wire(size, in_node, inf, 0.0)
    if size <= in_node:
        return Wire(size, in_node, inside.rate, inside.latency, by_gloo=by_gloo) if inside else Wire(size, in_node, inf, 0.0, known=False)
    if between is None or (in_node > 1 and inside is None):
        return Wire(size, in_node, inf, 0.0, known=False)
    rate, hop = between.rate * in_node, between.latency
    if inside is not None and in_node > 1:
        rate, hop = min(inside.rate, rate), (between.latency + (in_node - 1) * inside.latency) / in_node
    return Wire(size, in_node, rate, hop, by_gloo=by_gloo)
