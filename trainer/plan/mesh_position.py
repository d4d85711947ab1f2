"""A rank's seat: its place on the mesh, and the parts of the model that it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..models.families import FAMILIES
from ..models.table import Table, named
from ..spec.run import Run
from .cost_context import Frame
from .layout import Layout
from .mesh import Mesh
from .weight_slices import Placed, placed


@dataclass(frozen=True, kw_only=True)
class Part:
    """Consecutive layers of a model, with the embedding before them or the head after them where they are its ends."""

    layers: range
    first: bool
    last: bool


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank, its place on every axis, and its parts of the model in the order of the layers."""

    rank: int
    mesh: Mesh
    place: dict[str, int]
    parts: tuple[Part, ...]

    def holds(self, run: Run, part: Part) -> Iterator[Placed]:
        """What it holds of each weight of one of its parts, in the table's order."""
        table: Table = FAMILIES[run.model.family](run.model, run.train)
        for parameter in named(table, part.layers, first=part.first, last=part.last):
            yield placed(
                parameter,
                table.sizes,
                self.mesh.tp,
                self.place["tp"],
                vocab_multiple=run.model.vocab_multiple,
                ep=self.mesh.ep,
                expert_rank=self.place["dp"] % self.mesh.ep,
            )


def seat(run: Run, rank: int) -> Seat:
    """The seat of a rank of a run that can be laid out."""
    layout = Frame(run).layout(run.parallel, run.train.microbatch)
    place = layout.mesh.coordinates(rank)
    return Seat(rank=rank, mesh=layout.mesh, place=place, parts=parts(layout, place["pp"]))


def parts(layout: Layout, stage: int) -> tuple[Part, ...]:
    """The parts of the model that a stage holds, in the order of the layers."""
    last = len(layout.partition.parts) - 1
    return tuple(Part(layers=range(*layout.layers(part)), first=part == 0, last=part == last) for part in layout.parts(stage))
