"""The messages of a step on one rank, as its engine, its stage's layers and its data-parallel rank determine them."""

from __future__ import annotations

from collections import Counter

from ..spec.run import Run
from . import tp_gradient_sums
from .axes import pp
from .axes.collectives import collective_cost
from .axes.traffic_row import TrafficRow
from .costs.cost_context import CostContext
from .engines import cost_model
from .layout.layout import Layout
from .layout_cost import LayoutCost, layout_cost, send_bytes, sends_per_step
from .layout_of_run import layout_of_run
from .plan_data import Message
from .stage_cost import data_traffic


def rank_traffic(run: Run, rank: int) -> tuple[Message, ...]:
    """The messages of a step on one rank of a legal run."""
    context = CostContext(run)
    layout = layout_of_run(context, run.parallel, run.train.microbatch)
    coordinates = layout.mesh.coordinates(rank)
    cost = layout_cost(context, layout)
    return _messages(_stage_rows(context, layout, cost, coordinates["pp"], layout.mesh.data_rank(coordinates), coordinates["tp"]), cost)


def busiest_traffic(context: CostContext, layout: Layout, cost: LayoutCost) -> tuple[Message, ...]:
    """The messages of a step on the rank that sends most."""
    one_of_each = [layout.partition.kind_of_stage.index(at) for at in range(len(cost.kinds))]
    every = [_stage_rows(context, layout, cost, stage, None) for stage in one_of_each]
    return _messages(max(every, key=lambda rows: sum(row.sent for row in rows)), cost)


def _stage_rows(context: CostContext, layout: Layout, cost: LayoutCost, stage: int, data: int | None, tensor: int = 0) -> list[TrafficRow]:
    """Traffic of a rank of the data axis (None: of the one that sends most) and of the tensor axis of a stage."""
    partition, blocks, pair = layout.partition, cost.blocks, layout.wires.pair
    at = partition.kind_of_stage[stage]
    stage_cost, kind = cost.kinds[at], partition.kinds[at]
    rows = tp_gradient_sums.traffic_rows(context, layout, blocks, kind, data) + data_traffic(layout, stage_cost, data)
    rows += cost_model(layout.engine).matrix_rows(context, layout, kind, data, tensor)
    if layout.mesh.pp > 1:
        exposed = not layout.parallel.overlap.pipeline
        rows += pp.stage_sends(send_bytes(layout.parallel, blocks), sends_per_step(layout, stage), pair, exposed=exposed)
        if blocks.tied_gradient and kind.first != kind.last:
            engine = cost_model(layout.engine)
            elements = engine.tied_elements(context, layout, blocks, data)
            rows += pp.tied_sum(elements * engine.summed_width(context, layout), pair) if elements else []
    counts: Counter[tuple[str, str, int]] = Counter()
    for many, block in ((kind.layers, blocks.layer), (kind.first, blocks.first), (kind.last, blocks.head)):
        for message in block.messages if many else ():
            counts[message.axis, message.verb, message.payload] += many * (message.forward + message.backward) * layout.micros
    return rows + _block_rows(layout, counts, layout.micros * (stage_cost.passes.message_forward + stage_cost.passes.message_backward))


def _block_rows(layout: Layout, counts: Counter[tuple[str, str, int]], exposed: float) -> list[TrafficRow]:
    """Traffic of the messages inside blocks; their `exposed` seconds are divided among them by their length."""
    rows = []
    for (axis, verb, payload), count in counts.items():
        wire = layout.wires.axes[axis]
        sent, seconds = collective_cost(verb, payload, wire)
        rows.append((axis, verb, payload, count, sent * count, wire.link, seconds * count))
    whole = sum(row[-1] for row in rows)
    return [TrafficRow(*row, exposed * row[-1] / whole if whole else 0.0) for row in rows]


def _messages(rows: list[TrafficRow], cost: LayoutCost) -> tuple[Message, ...]:
    """The rows as a plan gives them: without seconds where a rate is unknown."""
    timed = cost.seconds is not None
    return tuple(
        Message(
            axis=row.axis,
            verb=row.verb,
            payload=row.payload,
            count=row.times,
            sent=row.sent,
            link=row.link,
            seconds=row.seconds if timed else None,
            exposed=row.exposed if timed else None,
            every=row.every,
        )
        for row in rows
    )
