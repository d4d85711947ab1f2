"""What each span of a step takes, from the costs of a plan's layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...spec.run import Run
from ..costs.block_costs import BlockCost, BlockCosts
from ..costs.cost_context import CostContext
from ..layout.layout import Layout
from ..layout.schedules import stage_and_chunk
from ..layout_cost import LayoutCost, hop_seconds, layout_cost, tied_seconds
from ..layout_of_run import layout_of_run
from ..part_seconds import is_simulated, part_message_seconds, part_seconds
from ..replica_wait import replica_wait_seconds
from ..stage_cost import StageCost, last_passes
from .timeline import PASS_KINDS


class PlannedPass(NamedTuple):
    """Seconds of a pass: of computation, and of messages that it waits for."""

    computing: float
    messages: float

    @property
    def total(self) -> float:
        """Both."""
        return self.computing + self.messages


class EndSeconds(NamedTuple):
    """Seconds of what follows a stage's passes: the exposed sum of its gradients, its optimizer's step, the exposed gather of weights."""

    sums: float
    step: float
    gather: float


class MessageRound(NamedTuple):
    """Messages of the data axis that a stage sends together: at every micro-batch (`is_repeated`), else once a step or once an update."""

    verb: str
    payload: int  # bytes of one message
    parts: int
    seconds: float
    exposed: float  # of these seconds, those that no pass hides
    under_forward: bool  # forward hides the rest, else backward
    is_repeated: bool
    an_update: float  # rounds for each update of the weights, of those that are not repeated


class BlockWeight(NamedTuple):
    """A block of a part of the model, and the seconds of its forward and its backward."""

    name: str
    forward: float
    backward: float


class StepCosts(NamedTuple):
    """What the spans of a step take, in seconds, and what the step takes by the plan's own sum."""

    layout: Layout
    passes: dict[tuple[str, int], PlannedPass]  # (kind, part of the model)
    ends: tuple[EndSeconds, ...]  # of each stage; without a flush, of each update
    send: float  # of a message between neighbouring stages
    send_blocks: bool  # a stage waits until its message has arrived; else it goes on
    tied: float
    host: float
    planned: float
    saved: tuple[float, ...]  # of each stage, bytes of activations of a micro-batch on one of its parts
    rounds: tuple[tuple[MessageRound, ...], ...]  # of each stage
    shares: tuple[float, ...]  # of each part of the model, of its stage's layers
    blocks: tuple[tuple[BlockWeight, ...], ...]  # of each part of the model
    layers: tuple[tuple[tuple[int, int], ...], ...]  # of each stage, (first, last + 1) of each of its parts


def step_costs(run: Run) -> StepCosts | None:
    """The costs of a legal run's step; None: a rate is unknown."""
    context = CostContext(run)
    layout = layout_of_run(context, run.parallel, run.train.microbatch)
    cost = layout_cost(context, layout)
    return _step_costs(context, layout, cost, cost.seconds.step) if cost.seconds else None


def _step_costs(context: CostContext, layout: Layout, cost: LayoutCost, planned: float) -> StepCosts:
    """The wait for the slowest of many nodes lengthens every span but the optimizer's step, as it does in a plan."""
    tail_factor, kinds = 1 + context.tail, [cost.kinds[at] for at in layout.partition.kind_of_stage]
    wait = replica_wait_seconds(context, layout, cost.blocks, kinds[0].messages)
    return StepCosts(
        layout=layout,
        passes=_passes(layout, cost.blocks, kinds, tail_factor),
        ends=tuple([_end_seconds(layout, kind, wait, tail_factor) for kind in kinds]),
        send=hop_seconds(layout, cost.blocks) / (2 * layout.chunks) * tail_factor,
        send_blocks=not is_simulated(layout),  # as the plan counts them
        tied=tied_seconds(context, layout, cost.blocks) * tail_factor,
        host=context.step_overhead,
        planned=planned,
        saved=tuple([(kind.passes.saved + kind.passes.held.passing) / layout.chunks for kind in kinds]),
        shares=tuple([_share_of_stage(layout, part) for part in range(len(layout.partition.parts))]),
        rounds=tuple([tuple(_message_rounds(layout, kind, tail_factor)) for kind in kinds]),
        blocks=tuple([tuple(_block_weights(layout, cost.blocks, part)) for part in range(len(layout.partition.parts))]),
        layers=tuple([context.layers_of_stage(layout, stage) for stage in range(len(kinds))]),
    )


def _passes(layout: Layout, blocks: BlockCosts, kinds: Sequence[StageCost], tail_factor: float) -> dict[tuple[str, int], PlannedPass]:
    """The passes of all parts, each with its share of the messages that its stage exposes at every micro-batch."""
    seconds, messages = part_seconds(layout, blocks), part_message_seconds(layout, blocks)
    passes: dict[tuple[str, int], PlannedPass] = {}
    for stage, kind_of_stage in enumerate(kinds):
        repeated = _repeated_seconds(tuple(_message_rounds(layout, kind_of_stage, tail_factor)))
        for part in layout.parts(stage):
            share = _share_of_stage(layout, part)
            for kind in PASS_KINDS:
                waited = messages(kind, part)
                computing = seconds(kind, part) - waited
                passes[kind, part] = PlannedPass(computing * tail_factor, waited * tail_factor + share * repeated[kind])
    return passes


def _share_of_stage(layout: Layout, part: int) -> float:
    """The share of its stage's layers that a part of the model has."""
    stage, _ = stage_and_chunk(part, layout.mesh.pp, folded=layout.is_folded)
    layers = layout.partition.counts[stage]
    return layout.partition.parts[part] / layers if layers else 0.0


def _repeated_seconds(rounds: Sequence[MessageRound]) -> dict[str, float]:
    """Exposed seconds of the data axis's messages at each micro-batch, by the kind of pass that hides the rest of them.

    Where a backward is in two, gradients of weights are summed after the second half.
    """
    seconds = dict.fromkeys("FBIW", 0.0)
    for each in rounds:
        for kind in ("F" if each.under_forward else "BW") if each.is_repeated else "":
            seconds[kind] += each.exposed
    return seconds


def _end_seconds(layout: Layout, kind: StageCost, wait: float, tail_factor: float) -> EndSeconds:
    """What follows the passes of a step, or those of an update where the pipeline does not flush; `wait`: seconds a step for the slowest
    replica."""
    updates = layout.gradient_sync.updates
    at_end = [each for each in _message_rounds(layout, kind, tail_factor) if not each.is_repeated]
    gathered = sum([each.exposed * each.an_update for each in at_end if each.verb == "all_gather"])
    summed = sum([each.exposed * each.an_update for each in at_end if each.verb != "all_gather"])
    return EndSeconds(summed + (kind.states.sums + wait) / updates * tail_factor, kind.step / updates, gathered)


def _message_rounds(layout: Layout, kind: StageCost, tail_factor: float) -> Iterator[MessageRound]:
    """The messages of the data axis on a kind of stage."""
    sync, last, passes = layout.gradient_sync, last_passes(layout), kind.passes
    for each in kind.messages:
        exposed = each.exposed_seconds(last * passes.forward, last * passes.backward, layout.micros * passes.compute) / each.rounds
        repeated = each.rounds == layout.micros and (each.rounds != sync.updates or sync.zero == 3)
        yield MessageRound(
            verb=each.verb,
            payload=each.payload,
            parts=each.parts,
            seconds=each.seconds * tail_factor,
            exposed=exposed * tail_factor,
            under_forward=each.under_forward,
            is_repeated=repeated,
            an_update=each.rounds / sync.updates,
        )


def _layer_block(layout: Layout, blocks: BlockCosts, layer: int) -> BlockCost:
    return blocks.dense_layer if blocks.dense_layer and layer < layout.partition.dense_layers else blocks.layer


def _block_weights(layout: Layout, blocks: BlockCosts, part: int) -> Iterator[BlockWeight]:
    """The blocks of a part of the model, in the order of its forward."""
    first, end = layout.layers(part)
    named = [("embedding", blocks.embedding)] if part == 0 else []
    named += [(f"layer {layer}", _layer_block(layout, blocks, layer)) for layer in range(first, end)]
    named += [("head", blocks.head)] if part == len(layout.partition.parts) - 1 else []
    for name, block in named:
        yield BlockWeight(name, (block.forward or 0.0) + block.message_forward, (block.backward or 0.0) + block.message_backward)
