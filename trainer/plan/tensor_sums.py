"""What the tensor axis adds up once a step: gradients of weights that several of its ranks hold, each with a part of them.

Under sequence parallel each rank has its tokens' part of a replicated weight's gradient (arXiv:2205.05198 leaves them out). Key and
value heads fewer than ranks: each rank of a few that hold the same has its query heads' part.
"""

from __future__ import annotations

from collections.abc import Iterator

from .axes import tp
from .axes.traffic_row import Line
from .block_costs import Pieces
from .cost_context import Frame
from .deepspeed.flat_tensors import Also
from .deepspeed.memory import MASTER, stage_of
from .layout import Kind, Layout


def lines(frame: Frame, layout: Layout, pieces: Pieces, kind: Kind, data: int | None = None) -> list[Line]:
    """One message for each, on the data-parallel rank `data` of a kind of stage; None: on the one with most."""
    return [
        tp.once(axis, elements * frame.widths.gradient, layout.wires.tp if also == "replicated" else frame.sharing(layout.mesh))
        for axis, also in _said(layout, pieces)
        if (elements := _elements(frame, layout, pieces, kind, also, data))
    ]


def _said(layout: Layout, pieces: Pieces) -> Iterator[tuple[str, Also]]:
    if layout.parallel.tp == 1:
        return
    if layout.parallel.sequence:
        yield "tp", "replicated"
    if pieces.layer.shared:
        yield "copies", "shared"


def _elements(frame: Frame, layout: Layout, pieces: Pieces, kind: Kind, also: Also, data: int | None) -> int:
    """ZeRO 1 to 3 without a pipeline adds up what a rank steps, but for bf16 with float32 gradients at stage 1, which keeps all of
    them; else it is all that the stage holds."""
    width = frame.widths
    stage = stage_of(layout.parallel.zero, half=width.weight < MASTER, ep=layout.mesh.ep)
    if stage and layout.way.deepspeed and layout.mesh.pp == 1 and not (stage == 1 and width.gradient > width.weight):
        return frame.stepped(kind, also, stage, layout.mesh, data)
    ends = (pieces.embedding,) * kind.first + (pieces.head,) * kind.last
    if also == "shared":
        return kind.layers * pieces.layer.shared
    return kind.layers * pieces.layer.replicated + sum(end.replicated for end in ends)
