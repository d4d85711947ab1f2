"""Small messages by which ranks agree on a step: norms, losses, flags, counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...models.families import has_experts
from ...spec.run import Run
from ..layout.mesh import Mesh

INTEGER = 8  # bytes


@dataclass(frozen=True, kw_only=True)
class ControlMessage:
    """Equal control messages that a rank sends in a step: the verb, bytes of one, how many, and what they are, in words."""

    verb: str
    payload: int
    count: int
    says: str


def further_losses(run: Run) -> int:
    """Return how many numbers the engines sum beside the loss: the loss of further tokens, what routers add to the loss, and of preferences
    the share of pairs in order and the two mean rewards."""
    return (run.model.mtp.layers > 0) + run.model.adds_router_loss + 3 * run.data.has_preferences


def counts_of_routing(run: Run) -> int:
    """Return how many numbers the engines sum of the routing of all layers: tokens of each expert, copies computed, near ties."""
    return run.model.mixture_layers * (run.model.experts + 2) if has_experts(run.model) else 0


def routing_messages(run: Run, mesh: Mesh, layers: int) -> Iterator[ControlMessage]:
    """What the routers of a rank's `layers` send: the rows for each expert, and, of the tokens of a sequence that other ranks have, the
    choices (for an expert's capacity) or how many chose each expert (for the auxiliary loss)."""
    model, train = run.model, run.train
    if not has_experts(model):
        return
    forwards = layers * (train.batch // (mesh.dp * train.microbatch)) * (2 if run.parallel.recompute == "full" else 1)
    if mesh.ep > 1:
        yield ControlMessage(verb="all_to_all", payload=INTEGER * model.experts, count=forwards, says="rows for each expert")
    if mesh.cp > 1 and model.capacity is not None:
        choices = INTEGER * train.microbatch * train.seq * model.top_k
        yield ControlMessage(verb="all_gather", payload=choices, count=forwards, says="choices of a sequence's tokens")
    if mesh.cp > 1 and model.aux_loss:
        counts = INTEGER * train.microbatch * model.experts
        yield ControlMessage(verb="all_reduce", payload=counts, count=forwards, says="tokens of a sequence that chose each expert")
