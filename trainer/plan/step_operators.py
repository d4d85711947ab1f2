"""The seconds of a step in which a rank computes, by kind of operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .costs.block_costs import OpCosts, SplitCosts
from .costs.block_messages import block_messages, recomputed_ops
from .costs.cost_context import CostContext
from .costs.op_seconds import OpParts, OpSeconds, computes_narrow, op_flops
from .costs.operator_kinds import OPERATOR_KINDS, operator_kind
from .costs.pass_seconds import RankOp, dispatched_passes, messages_sent
from .costs.precision import COMPUTES
from .costs.roofline import KERNEL_GAP
from .layout.layout import Layout, StageKind
from .layout_cost import LayoutCost, busiest_kind, layout_split
from .plan_data import OperatorSeconds

AGAIN = OpParts._fields.index("again")


@dataclass
class _Sums:
    """Seconds of one kind of operator in a step; `at_peak`: of its products' FLOPs at the device's peak."""

    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0
    at_peak: float = 0.0
    unfilled: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.again

    def add(self, seconds: OpSeconds, again: float, times: int) -> None:
        """Add an op's seconds, `again` of them what its backward computes again, in so many passes."""
        self.forward += times * seconds.forward
        self.backward += times * (seconds.input_gradients + seconds.weight_gradients)
        self.again += times * again


def plan_operators(context: CostContext, layout: Layout, cost: LayoutCost) -> tuple[OperatorSeconds, ...]:
    """Return the seconds of a step by kind of operator, on a rank of the busiest stage, the longest first; they add up to those in which it
    computes. () where rates are not known."""
    seconds = cost.seconds
    if seconds is None:
        return ()
    split = layout_split(layout)
    costs = context.split_costs(split, layout.wires)
    busiest = busiest_kind(cost.kinds)
    sums: dict[str, _Sums] = defaultdict(_Sums)
    for row, many, recompute in _blocks(costs, layout.partition.kinds[busiest], split.recompute):
        _add_block(sums, costs, row, recompute, split.hooks, many * layout.micros, context)
    sums["slowest_rank"].forward = seconds.compute - layout.micros * cost.kinds[busiest].passes.compute
    rows = [
        OperatorSeconds(
            kind=kind,
            seconds=each.seconds,
            share=each.seconds / seconds.step,
            forward=each.forward,
            backward=each.backward,
            recomputed=each.again,
            peak=each.at_peak / each.seconds if each.at_peak else None,
            unfilled=each.unfilled,
        )
        for kind in OPERATOR_KINDS
        if (each := sums[kind]).seconds
    ]
    return tuple(sorted(rows, key=lambda each: -each.seconds))


def _blocks(costs: SplitCosts, kind: StageKind, recompute: str) -> Iterator[tuple[OpCosts, int, str]]:
    """Yield the blocks of a kind of stage, how many it has of each, and what of them is recomputed."""
    table, (embedding, head) = costs.table, costs.ends
    yield costs.layer, kind.layers + table.modules * kind.last, recompute
    if kind.first:
        yield embedding, 1, "none"
        if costs.dense_layer:
            yield costs.dense_layer, table.dense_layers, recompute
    if kind.last:
        yield head, 1, "none"
        for further in costs.further:
            yield further, table.modules, "none"


def _add_block(
    sums: dict[str, _Sums], costs: SplitCosts, row: OpCosts, recompute: str, hooks: int, times: int, context: CostContext
) -> None:  # fmt: skip
    """Add the seconds of a block that runs so many times in a step: of its ops, and those in which the device waits for the host."""
    assert costs.device
    ranked = costs.ranked_ops(row, recompute, hooks)
    for op_number, each in enumerate(ranked):
        _add_op(sums, costs, row, op_number, each, times, context)
    messages = tuple(block_messages(row.messages, recomputed_ops(row.ops, recompute), row.local.form))
    sent = costs.device.dispatch * messages_sent(messages, costs.split)
    passes = dispatched_passes(ranked, sent, in_turn=costs.device.is_cpu)
    forward, backward, again = [each.seconds() - each.computing for each in passes]
    sums["host"].add(OpSeconds(forward, backward, 0.0), again, times)


def _add_op(
    sums: dict[str, _Sums], costs: SplitCosts, row: OpCosts, number: int, ranked: RankOp, times: int, context: CostContext
) -> None:  # fmt: skip
    """Add the seconds of an op to its own kind and to those of what surrounds its kernels."""
    assert costs.device
    op, whole = row.ops[number], row.parts[number]
    device = replace(costs.device, launch=max(0.0, costs.device.launch - KERNEL_GAP))
    parts = costs.op_parts(op, row.local, device)
    core_again = ranked.seconds.input_gradients - row.seconds[number].input_gradients
    own = sums[operator_kind(op)]
    own.add(parts.own, parts.again.input_gradients + core_again + ranked.repeats * parts.own.forward, times)
    for kind, part in (("casts", parts.casts), ("gradient_sums", parts.sums), ("copies", parts.copies)):
        sums[kind].add(part, ranked.repeats * part.forward, times)
    gaps = [OpSeconds(*(one - other for one, other in zip(*both, strict=True))) for both in zip(whole, parts, strict=True)]
    again = gaps.pop(AGAIN).input_gradients
    for gap in gaps:
        sums["gaps"].add(gap, ranked.repeats * gap.forward, times)
    sums["gaps"].again += times * again
    forward, backward = op_flops(op, row.local)
    if not forward:
        return
    computes = COMPUTES[context.run.train.precision]
    peak = context.run.cluster.device.peak[computes[0] if computes_narrow(op, device) else computes[-1]]  # type: ignore[index]
    runs = 1 + ranked.repeats + (core_again > 0) + (parts.again.input_gradients > 0)
    own.at_peak += times * (runs * forward + backward) / peak
    filled = costs.op_parts(op, row.local, replace(device, fills_tiles=True)).own
    spared = [one - other for one, other in zip(parts.own, filled, strict=True)]
    own.unfilled += times * (sum(spared) + (runs - 1) * spared[0])
