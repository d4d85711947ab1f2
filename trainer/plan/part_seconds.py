"""The seconds of each part of a model, and what a simulated step of them waits."""

from __future__ import annotations

from collections.abc import Callable

from .costs.block_costs import BlockCost, BlockCosts
from .engines import cost_model
from .layout.layout import Layout
from .layout.step_order import step_order

MOST_PASSES = 1024  # of parts and micro-batches: of more, closed forms must do

HeldBlocks = list[tuple[BlockCost, int]]  # blocks of a part of the model, and how many it has of each


def is_simulated(layout: Layout) -> bool:
    """Whether a pipeline's step is simulated: lists of actions from a file, layers as the user gives them, and, where the step is not too
    long and the engine's costs ask for it, what has a closed form only if a forward and both halves of a backward take equally long."""
    schedule = layout.schedule
    if not schedule.flushes:
        return False  # no stage waits for a step's end
    if schedule.simulated or layout.parallel.stages:
        return True
    uneven = schedule.folded or schedule.splits_backward
    return uneven and cost_model(layout.engine).simulates_uneven and len(layout.partition.parts) * layout.micros <= MOST_PASSES


def simulated_wait(layout: Layout, blocks: BlockCosts, hop: float, busiest: float) -> float:
    """Return the seconds of a step beyond those in which the busiest stage computes; `busiest` are its seconds of a micro-batch, with `hop`
    seconds of messages between stages."""
    sends = 2 * layout.chunks  # a micro-batch's messages into and out of a stage's parts
    order = step_order(layout.schedule, layout.mesh.pp, layout.micros, layout.parallel.chunks)
    step = order.seconds(part_seconds(layout, blocks), hop / sends)
    return max(0.0, step - layout.micros * (busiest - hop))


def part_seconds(layout: Layout, blocks: BlockCosts) -> Callable[[str, int], float]:
    """Return the seconds of each kind of action on each part of the model, messages inside its blocks included."""
    return _of_parts(layout, blocks, _action_seconds)


def part_message_seconds(layout: Layout, blocks: BlockCosts) -> Callable[[str, int], float]:
    """Return those of these seconds in which an action waits for messages inside its blocks."""
    return _of_parts(layout, blocks, _message_seconds)


def _of_parts(layout: Layout, blocks: BlockCosts, of_blocks: Callable[[HeldBlocks], dict[str, float]]) -> Callable[[str, int], float]:
    """Return what `of_blocks` has of each kind of action, for each part of the model."""
    parts = layout.partition.parts
    known: dict[tuple[int, bool, bool], dict[str, float]] = {}  # parts with as many layers and the same ends take equally long
    of_parts: list[dict[str, float]] = []
    for part, layers in enumerate(parts):
        key = (layers, part == 0, part == len(parts) - 1)
        if key not in known:
            known[key] = of_blocks(_held_blocks(blocks, *key))
        of_parts.append(known[key])
    return lambda kind, part: of_parts[part][kind]


def _held_blocks(blocks: BlockCosts, layers: int, has_embedding: bool, has_head: bool) -> HeldBlocks:
    """The blocks of a part with so many layers and these ends of the model, and how many it has of each."""
    return [(blocks.layer, layers), *[(blocks.first, 1)] * has_embedding, *[(blocks.head, 1)] * has_head]


def _action_seconds(held: HeldBlocks) -> dict[str, float]:
    """The seconds of each kind of action on a part with these blocks."""
    forward = sum([((block.forward or 0.0) + block.message_forward) * many for block, many in held])
    backward = sum([((block.backward or 0.0) + block.message_backward) * many for block, many in held])
    weights = sum([block.weight_gradients * many for block, many in held])
    return {"F": forward, "B": backward, "I": backward - weights, "W": weights}


def _message_seconds(held: HeldBlocks) -> dict[str, float]:
    """The seconds in which each kind of action on a part with these blocks waits for messages; weights' gradients send none."""
    forward = sum([block.message_forward * many for block, many in held])
    backward = sum([block.message_backward * many for block, many in held])
    return {"F": forward, "B": backward, "I": backward, "W": 0.0}
