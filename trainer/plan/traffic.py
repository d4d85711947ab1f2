"""Every message of a step on one rank: what its engine, its stage's layers and its place on the data axis make it send."""

from __future__ import annotations

from ..spec.run import Run
from . import tensor_sums
from .axes import pp
from .axes.traffic_row import Line
from .collectives import Wire, cost
from .cost_context import Frame
from .layout import Layout
from .layout_cost import Costs, costs, handed, sends
from .result import Message


def rank_traffic(run: Run, rank: int) -> tuple[Message, ...]:
    """The messages of a step on one rank of a run that can be laid out."""
    frame = Frame(run)
    layout = frame.layout(run.parallel, run.train.microbatch)
    place = layout.mesh.coordinates(rank)
    return _messages(frame, layout, place["pp"], place["dp"] * layout.mesh.cp + place["cp"])


def stage_traffic(run: Run, stage: int) -> tuple[Message, ...]:
    """The messages of a step on a pipeline stage's rank that sends most: of its ranks they may differ under ZeRO 1 and 2."""
    frame = Frame(run)
    return _messages(frame, frame.layout(run.parallel, run.train.microbatch), stage, None)


def busiest(frame: Frame, layout: Layout, of: Costs) -> tuple[Message, ...]:
    """The messages of a step on the rank that sends most."""
    one_of_each = [layout.partition.which.index(at) for at in range(len(of.kinds))]
    every = [_lines(frame, layout, of, index, None) for index in one_of_each]
    return _told(max(every, key=lambda lines: sum(line.sent for line in lines)), of)


def _messages(frame: Frame, layout: Layout, stage: int, data: int | None) -> tuple[Message, ...]:
    of = costs(frame, layout)
    return _told(_lines(frame, layout, of, stage, data), of)


def _told(lines: list[Line], of: Costs) -> tuple[Message, ...]:
    return tuple(_message(line, timed=of.seconds is not None) for line in lines)


def _lines(frame: Frame, layout: Layout, of: Costs, index: int, data: int | None) -> list[Line]:
    partition, pieces, stages = layout.partition, of.pieces, layout.mesh.pp
    at = partition.which[index]
    kind, held = of.kinds[at], partition.kinds[at]
    lines = tensor_sums.lines(frame, layout, pieces, held, data) + list(kind.data)
    if stages > 1:
        pair = layout.wires.pair
        lines += pp.lines(handed(layout, pieces), sends(layout, index), pair, exposed=not layout.parallel.overlap.pipeline)
        if pieces.tied and held.first != held.last:
            lines += pp.tied(pieces.tied * frame.widths.gradient, pair)
    blocks = [(held.layers, pieces.layer)] + [(1, pieces.embedding)] * held.first + [(1, pieces.head)] * held.last
    spoken: dict[tuple[str, str, int], int] = {}
    for many, piece in blocks:
        for talk in piece.talks:
            key = (talk.axis, talk.verb, talk.payload)
            spoken[key] = spoken.get(key, 0) + many * (talk.forward + talk.backward) * layout.micros
    return lines + _spoken(layout, spoken, layout.micros * (kind.talk_forward + kind.talk_backward))


def _spoken(layout: Layout, spoken: dict[tuple[str, str, int], int], exposed: float) -> list[Line]:
    """The messages inside blocks; what of their seconds is exposed is shared out among them by their length."""
    rows = []
    for (axis, verb, payload), times in spoken.items():
        wire: Wire = getattr(layout.wires, axis)
        sent, seconds = cost(verb, payload, wire)
        rows.append((axis, verb, payload, times, sent * times, wire.link, seconds * times))
    whole = sum(row[-1] for row in rows)
    return [Line(*row, exposed * row[-1] / whole if whole else 0.0) for row in rows]


def _message(line: Line, *, timed: bool) -> Message:
    return Message(
        axis=line.axis,
        verb=line.verb,
        payload=line.payload,
        count=line.times,
        sent=line.sent,
        link=line.link,
        seconds=line.seconds if timed else None,
        exposed=line.exposed if timed else None,
    )
