"""The process groups of every rank of a mesh, and what DeepSpeed is told of them; the backend exchanges nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.trainer.engines.deepspeed.zero import ModelParallelUnit, model_parallel_unit  # noqa: E402
from distrain.trainer.engines.engine import Engine  # noqa: E402
from distrain.trainer.parallel.process_groups import Grid, make_grid  # noqa: E402
from distrain.trainer.parallel.rank_model import RankPart  # noqa: E402
from distrain.trainer.parallel.world import World  # noqa: E402
from distrain.trainer.plan.layout.mesh import Mesh  # noqa: E402
from distrain.trainer.plan.mesh_position import MeshPosition  # noqa: E402

MESHES = (Mesh(tp=2, dp=3), Mesh(tp=2, cp=3, dp=2), Mesh(tp=3, dp=4, ep=2))


@contextmanager
def grid_of(mesh: Mesh, rank: int, shard: int | Literal["all"] = "all") -> Iterator[Grid]:
    """The grid of a rank of a mesh, as if all other ranks were there."""
    dist.init_process_group("fake", rank=rank, world_size=mesh.world, store=FakeStore())
    try:
        world = World(rank=rank, size=mesh.world, device=torch.device("cpu"))
        yield make_grid(world, MeshPosition(rank=rank, mesh=mesh, coordinates=mesh.coordinates(rank), parts=()), shard=shard)
    finally:
        dist.destroy_process_group()


def unit_of(grid: Grid) -> ModelParallelUnit:
    unit = model_parallel_unit(grid)
    assert unit is not None
    return unit


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_deepspeed_is_told_the_tensor_axis_as_the_model_axis_and_dp_with_cp_as_the_data_axis(mesh: Mesh) -> None:
    for rank in range(mesh.world):
        place = mesh.coordinates(rank)
        alike = [other for other in range(mesh.world) if mesh.coordinates(other)["tp"] == place["tp"]]
        replica = [other for other in range(mesh.world) if all(mesh.coordinates(other)[axis] == place[axis] for axis in ("dp", "cp"))]
        with grid_of(mesh, rank) as grid:
            unit = unit_of(grid)
            assert (unit.get_model_parallel_rank(), unit.get_model_parallel_world_size()) == (place["tp"], mesh.tp)
            assert (unit.get_data_parallel_rank(), unit.get_data_parallel_world_size()) == (alike.index(rank), mesh.dp * mesh.cp)
            assert dist.get_process_group_ranks(unit.get_model_parallel_group()) == replica
            assert dist.get_process_group_ranks(unit.get_data_parallel_group()) == alike


def test_a_tensor_axis_alone_has_a_data_axis_of_this_rank_alone() -> None:
    with grid_of(Mesh(tp=2), 1) as grid:
        unit = unit_of(grid)
        assert (unit.get_data_parallel_rank(), unit.get_data_parallel_world_size()) == (0, 1)
        assert dist.get_process_group_ranks(unit.get_data_parallel_group()) == [1]
    with grid_of(Mesh(dp=2), 1) as grid:
        assert model_parallel_unit(grid) is None


class CountingEngine(Engine):
    """An engine that trains nothing."""

    def step(self, *_: Any, **__: Any) -> Any:
        """Unused."""

    def evaluate(self, *_: Any, **__: Any) -> Any:
        """Unused."""


def test_routing_is_counted_by_the_first_rank_of_each_tensor_group() -> None:
    run, mesh = load_recipe("quickstart", ["model=tiny_moe", "model.layers=2", "model.aux_loss=0.1"]), Mesh(tp=2, dp=3)
    for rank in range(mesh.world):
        part, own = torch.nn.Module(), mesh.coordinates(rank)["tp"] == 0
        part.routing_counts = {"layers.1": torch.tensor([6, 3, 2, 1, 11, 5])}
        part.added_losses = [torch.tensor(2.0), torch.tensor(0.5)]
        with grid_of(mesh, rank) as grid:
            figures = CountingEngine(run, [RankPart(module=part, weight_shards={})], grid).figures
            others = figures.take_all()
            assert others.tolist() == [2.5, *[0] * 6, 6, 3, 2, 1, 11, 5] if own else not any(others)
            assert not any(figures.take_all())
            sums = figures.join(torch.tensor(8.0), torch.tensor(9.0, dtype=torch.float64), others)
            (loss, squares, *further), counts = figures.split(sums)
            assert (loss, squares) == (8 * own, 9)
            assert figures.result_fields(further, counts)["router_loss"] == 2.5 * own


@pytest.mark.parametrize(
    ("mesh", "shard", "expected"),
    [
        (Mesh(dp=4), 2, {"shard": (0, 1), "shard_copies": (0, 2)}),
        (Mesh(dp=4), "all", {"shard": (0, 1, 2, 3)}),
        (Mesh(dp=8, ep=2), 4, {"shard": (0, 1, 2, 3), "shard_copies": (0, 4), "expert_shard": (0, 2), "expert_shard_copies": (0, 4)}),
        (Mesh(dp=4, ep=2), "all", {"shard": (0, 1, 2, 3), "expert_shard": (0, 2)}),
    ],
)
def test_zero_shards_over_these_ranks(mesh: Mesh, shard: Any, expected: dict[str, tuple[int, ...]]) -> None:
    with grid_of(mesh, 0, shard) as grid:
        assert {name: group.ranks for name, group in grid.groups.items() if "shard" in name} == expected


def test_the_ends_of_a_pipeline_share_a_group() -> None:
    with grid_of(Mesh(pp=4, dp=2), 0) as grid:
        ends = grid.group("ends")
        assert ends is not None
        assert ends.ranks == (0, 6)
    with grid_of(Mesh(dp=2), 0) as grid:
        assert grid.group("ends") is None
