"""A rank's position on the mesh, and the parts of the model that it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..models.families import op_table
from ..models.ops.op_table import model_parameters
from ..spec.run import Run
from .axes.weight_slices import WeightShard, weight_shard
from .costs.cost_context import CostContext
from .layout.layout import Layout
from .layout.mesh import Mesh
from .layout_of_run import layout_of_run


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """Consecutive layers of a model, with the embedding before the first of the model and the head after the last."""

    layers: range
    first: bool
    last: bool


@dataclass(frozen=True, kw_only=True)
class MeshPosition:
    """A rank, its coordinate on every axis, and its parts of the model in the order of the layers."""

    rank: int
    mesh: Mesh
    coordinates: dict[str, int]
    parts: tuple[ModelPart, ...]

    def weight_shards(self, run: Run, part: ModelPart) -> Iterator[WeightShard]:
        """Its shard of each weight of one of its parts, in the table's order."""
        table = op_table(run)
        for parameter in model_parameters(table, part.layers, first=part.first, last=part.last):
            yield weight_shard(
                parameter,
                table.sizes,
                self.mesh.tp,
                self.coordinates["tp"],
                vocab_multiple=run.model.vocab_multiple,
                ep=self.mesh.ep,
                expert_rank=self.coordinates["dp"] % self.mesh.ep,
            )


def mesh_position(run: Run, rank: int) -> MeshPosition:
    """The position of a rank of a legal run."""
    layout = layout_of_run(CostContext(run), run.parallel, run.train.microbatch)
    coordinates = layout.mesh.coordinates(rank)
    return MeshPosition(rank=rank, mesh=layout.mesh, coordinates=coordinates, parts=stage_parts(layout, coordinates["pp"]))


def stage_parts(layout: Layout, stage: int) -> tuple[ModelPart, ...]:
    """The parts of the model that a stage holds, in the order of the layers."""
    last = len(layout.partition.parts) - 1
    return tuple(ModelPart(layers=range(*layout.layers(part)), first=part == 0, last=part == last) for part in layout.parts(stage))
