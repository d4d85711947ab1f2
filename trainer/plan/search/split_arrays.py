"""The costs of a model's blocks under many splits at once: `BlockCosts` whose fields are arrays, with an element for each split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from ..axes.axis import ActivationForm
from ..axes.collectives import Wire
from ..costs.block_costs import BlockCost, BlockCosts, SplitCosts
from ..costs.cost_context import CostContext
from ..costs.local_tensors import BlockSplit
from ..layout.mesh import Wires

Array = Any  # of numbers, one for each of many splits or layouts


class SplitOnWires(NamedTuple):
    """A split with its wires and its micro-batch, which counts in place of the split's own."""

    split: BlockSplit
    wires: Wires
    microbatch: int


class Form(NamedTuple):
    """What an engine makes of layers: the form of activations, whether layers are compiled, whether they compute while messages travel."""

    activations: ActivationForm
    fused: bool
    hides_messages: bool


def blocks_of_splits(context: CostContext, rows: Sequence[SplitOnWires], form: Form, recomputes: Sequence[str]) -> BlockCosts:
    """The costs of the blocks of each split under the first recomputation, then of each under the second, ...; all splits are equal in
    sequence parallelism. Their own form is not read."""
    import numpy as np

    split = _merged_splits(rows)._replace(form=form.activations, fused=form.fused)
    split = split if form.hides_messages else split._replace(overlapped=())
    costs = SplitCosts(context.run, context.table, split, _merged_wires(rows))
    blocks = [costs.blocks(recompute, split.hooks) for recompute in recomputes]
    return map_fields(lambda *each: np.concatenate([np.broadcast_to(one, len(rows)) for one in each]), blocks)


def map_fields(function: Callable[..., Any], blocks: Sequence[BlockCosts]) -> BlockCosts:
    """The function of each number of several block costs; messages and counts of all parameters are left out."""
    has_dense = blocks[0].dense_layer is not None
    names = ("embedding", *(("dense_layer", "first") if has_dense else ()), "layer", "head")
    mapped: dict[str, Any] = {name: _map_block(function, [getattr(each, name) for each in blocks]) for name in names}
    if not has_dense:
        mapped["first"] = mapped["embedding"]
    whole = {name: function(*[getattr(each, name) for each in blocks]) for name in ("tied", "stream", "saved_once")}
    return replace(blocks[0], **mapped, **whole, elements=())


def _map_block(function: Callable[..., Any], blocks: Sequence[BlockCost]) -> BlockCost:
    values: dict[str, Any] = {}
    for each in fields(BlockCost):
        rows = [getattr(block, each.name) for block in blocks]
        values[each.name] = () if each.name == "messages" else None if rows[0] is None else function(*rows)
    return BlockCost(**values)


def _merged_splits(rows: Sequence[SplitOnWires]) -> BlockSplit:
    """The splits as one whose degrees and micro-batch are arrays."""
    import numpy as np

    first = rows[0].split
    each = [dict(row.split.degrees) for row in rows]
    names = [name for name in rows[0].wires.axes if any(name in degrees for degrees in each)]
    every: dict[str, Any] = {name: np.array([degrees.get(name, 1) for degrees in each]) for name in names}
    microbatch: Any = np.array([row.microbatch for row in rows])
    overlapped = tuple(name for name in names if any(name in row.split.overlapped for row in rows))
    return first._replace(degrees=tuple(every.items()), overlapped=overlapped, microbatch=microbatch)


def _merged_wires(rows: Sequence[SplitOnWires]) -> Wires:
    first = rows[0].wires
    return replace(first, axes={name: merged_wire([row.wires.axes[name] for row in rows]) for name in first.axes})


def merged_wire(wires: Sequence[Wire]) -> Wire:
    """The wires as one whose fields are arrays."""
    import numpy as np

    known, by_gloo = all(wire.known for wire in wires), any(wire.by_gloo for wire in wires)
    numbers: dict[str, Any] = {name: np.array([getattr(wire, name) for wire in wires]) for name in ("size", "in_node", "rate", "hop")}
    return Wire(**numbers, by_gloo=by_gloo, known=known)
