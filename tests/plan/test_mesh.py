"""Ranks on the mesh and layers on the stages: properties of every mesh, and the cluster of 6 x 8 x 64."""

from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distrain.trainer.plan.layout.layout import ONE_BY_ONE, _almost_balanced_layers, balanced_layers, mesh_of
from distrain.trainer.plan.layout.mesh import Mesh, RankStrides, mesh_order, ranks_in_node, split_group
from distrain.trainer.spec.run import Parallel

EVERY = ("pp", "dp", "cp", "ep", "tp", "data", "expert_copies")


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """A mesh of at most a few hundred ranks, on no borders of nodes."""
    degrees = st.sampled_from([1, 1, 2, 3, 4, 6, 8])
    ep = draw(st.sampled_from([1, 2, 3, 4]))
    mesh = Mesh(pp=draw(degrees), dp=ep * draw(degrees), cp=draw(degrees), ep=ep, tp=draw(degrees))
    assume(mesh.world <= 600)
    return mesh


@given(meshes(), st.data())
def test_ranks_and_coordinates_are_one_to_one(mesh: Mesh, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, mesh.world - 1))
    place = mesh.coordinates(rank)
    assert mesh.rank(**place) == rank
    assert all(0 <= place[axis] < getattr(mesh, axis) for axis in mesh_order())


@given(meshes())
def test_every_coordinate_is_some_rank(mesh: Mesh) -> None:
    places = {tuple(mesh.coordinates(rank).values()) for rank in range(mesh.world)}
    assert len(places) == mesh.world == mesh.pp * mesh.dp * mesh.cp * mesh.tp


@given(meshes(), st.sampled_from(EVERY))
def test_groups_of_an_axis_hold_every_rank_once(mesh: Mesh, axis: str) -> None:
    groups = list(mesh.groups(axis))
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
    assert {len(group) for group in groups} == {mesh.size(axis)}


@given(meshes(), st.sampled_from(mesh_order()))
def test_ranks_of_a_group_differ_only_on_its_axis(mesh: Mesh, axis: str) -> None:
    for group in mesh.groups(axis):
        places = [mesh.coordinates(rank) for rank in group]
        assert [place.pop(axis) for place in places] == list(range(getattr(mesh, axis)))
        assert all(place == places[0] for place in places)


@given(meshes())
def test_a_data_group_is_dp_and_cp_together(mesh: Mesh) -> None:
    for group in mesh.groups("data"):
        places = [mesh.coordinates(rank) for rank in group]
        assert len({(place["pp"], place["tp"]) for place in places}) == 1
    assert mesh.size("data") == mesh.dp * mesh.cp


@given(meshes())
def test_an_ep_group_holds_each_expert_once_and_expert_copies_hold_the_same(mesh: Mesh) -> None:
    held = {rank: mesh.coordinates(rank)["dp"] % mesh.ep for rank in range(mesh.world)}
    assert all([held[rank] for rank in group] == list(range(mesh.ep)) for group in mesh.groups("ep"))
    assert all(len({held[rank] for rank in group}) == 1 for group in mesh.groups("expert_copies"))
    assert mesh.size("ep") * mesh.size("expert_copies") == mesh.size("data")


@given(meshes(), st.sampled_from(EVERY), st.data())
def test_in_node_is_the_fewest_ranks_that_a_group_has_in_a_node(mesh: Mesh, axis: str, data: st.DataObject) -> None:
    gpus = data.draw(st.sampled_from([each for each in range(1, 17) if mesh.world % each == 0]))
    nodes = [[rank // gpus for rank in group] for group in mesh.groups(axis)]
    assert mesh.in_node(axis, gpus) == min(each.count(node) for each in nodes for node in each)


def test_copies_of_experts_that_do_not_end_where_nodes_end_are_counted_node_by_node() -> None:
    uneven = 0
    for copies, cp, ep, tp in product((1, 2, 3), (2, 3), (2, 3), (1, 2)):
        mesh = Mesh(pp=1, dp=ep * copies, cp=cp, ep=ep, tp=tp)
        for gpus in [each for each in range(2, mesh.world) if mesh.world % each == 0]:
            nodes = [[rank // gpus for rank in group] for group in mesh.groups("expert_copies")]
            assert mesh.in_node("expert_copies", gpus) == min(each.count(node) for each in nodes for node in each), (mesh, gpus)
            uneven += ranks_in_node(mesh.strides("expert_copies"), gpus) is None
    assert uneven > 30


def members(runs: RankStrides) -> tuple[int, ...]:
    """The ranks of runs that begin at rank 0, innermost first."""
    ranks: tuple[int, ...] = (0,)
    for size, stride in runs:
        ranks = tuple(rank + step * stride for step in range(size) for rank in ranks)
    return ranks


@given(meshes(), st.sampled_from(["data", "expert_copies"]), st.data())
def test_shards_and_their_copies_form_a_group(mesh: Mesh, axis: str, data: st.DataObject) -> None:
    size = mesh.size(axis)
    ranks = data.draw(st.sampled_from([each for each in range(1, size + 1) if size % each == 0]))
    near, far = map(members, split_group(mesh.strides(axis), ranks))
    assert (len(near), len(far)) == (ranks, size // ranks)
    assert sorted(one + other for one in near for other in far) == sorted(mesh.members(axis))


def test_dp_auto_takes_the_remaining_ranks() -> None:
    assert mesh_of(Parallel(tp=4, pp=2, cp=2), 64) == Mesh(pp=2, dp=4, cp=2, tp=4)


# 6 x 8 x 64: six replicas of 64 stages of 8 ranks, on 384 nodes of 8 (arXiv:2104.04473 table 1, 1T).
CANONICAL = Mesh(pp=64, dp=6, tp=8)


def node(rank: int) -> int:
    return rank // 8


def test_tensor_parallel_ranks_of_6x8x64_share_a_node() -> None:
    assert all(len(set(map(node, group))) == 1 for group in CANONICAL.groups("tp"))
    assert CANONICAL.in_node("tp", 8) == 8


def test_data_parallel_ranks_of_6x8x64_never_share_a_node() -> None:
    assert all(len(set(map(node, group))) == 6 for group in CANONICAL.groups("dp"))
    assert CANONICAL.in_node("dp", 8) == 1


def test_each_stage_of_6x8x64_is_on_six_nodes_of_its_own() -> None:
    stages = [{node(rank) for rank in range(CANONICAL.world) if CANONICAL.coordinates(rank)["pp"] == stage} for stage in range(64)]
    assert [sorted(nodes) for nodes in stages] == [list(range(6 * stage, 6 * stage + 6)) for stage in range(64)]


def loads(counts: tuple[int, ...], layer: float, first: float, last: float) -> list[float]:
    return [layer * each + first * (at == 0) + last * (at == len(counts) - 1) for at, each in enumerate(counts)]


def splits(layers: int, stages: int) -> list[tuple[int, ...]]:
    """Every way to give each stage a layer or more."""
    if stages == 1:
        return [(layers,)]
    return [(first, *rest) for first in range(1, layers - stages + 2) for rest in splits(layers - first, stages - 1)]


@given(st.integers(1, 9), st.integers(1, 4), st.floats(0, 3), st.floats(0, 3))
def test_an_uneven_split_of_layers_minimizes_the_fullest_stage(layers: int, stages: int, first: float, last: float) -> None:
    assume(layers >= stages and layers % stages)
    counts = balanced_layers(layers, stages, 1.0, first, last)
    assert sum(counts) == layers
    best = min(max(loads(each, 1.0, first, last)) for each in splits(layers, stages))
    assert max(loads(counts, 1.0, first, last)) == pytest.approx(best, rel=1e-12)


@given(st.integers(1, 8), st.integers(1, 8), st.floats(0, 9), st.floats(0, 9))
def test_layers_that_divide_are_split_evenly(each: int, stages: int, first: float, last: float) -> None:
    assert balanced_layers(each * stages, stages, 1.0, first, last) == (each,) * stages


@given(st.integers(2, 9), st.integers(10 * ONE_BY_ONE, 10**12), st.floats(0, 60), st.floats(0, 60))
def test_of_a_huge_model_each_stage_leaves_two_or_three_layers_to_be_assigned_one_at_a_time(
    stages: int, layers: int, first: float, last: float
) -> None:
    counts = _almost_balanced_layers(layers, stages, 1.0, first, last)
    assert len(counts) == stages
    assert 2 * stages <= layers - sum(counts) < 3 * stages
    heaviest = max(loads(tuple(counts), 1.0, first, last))
    assert heaviest - min(loads(tuple(counts), 1.0, first, last)) < 1
    assert heaviest < (layers + first + last) / stages
