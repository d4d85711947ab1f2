"""Data parallelism: gradients are summed over the ranks that hold the same weights, and ZeRO gathers weights (arXiv:1910.02054).

The papers' ZeRO-1 and 2 scatter gradients and gather weights: 2 Psi a step. ZeRO-3 gathers weights for forward and for backward
and scatters gradients: 3 Psi a micro-batch. A `GradientSync` says where an engine differs (trainer/plan/costs/cost_model.py).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from .axis import Axis
from .collectives import Wire, collective_cost, server_seconds
from .powersgd_factors import FactorElements
from .traffic_row import TrafficRow

AXIS = Axis(name="dp", splits=("batch",), data=True, overlap="data", source="arXiv:1910.02054")

HOST = "host"  # the axis and the link of copies between a device and its host

# Share of a hidden message's time that the computation beside it loses: its kernels take multiprocessors and memory.
CONTENTION = 0.5

Pass = Literal["forward", "backward", ""]  # of a stage, under which messages may hide; "": under none


class ZeroShards(NamedTuple):
    """Parameters on one rank, trained and frozen, and the groups of their data parallelism."""

    elements: int
    frozen: int
    whole: Wire  # the ranks that hold the same parameters
    shard: Wire  # the ranks of it over which ZeRO shards them
    copies: Wire | None  # the ranks that own the same shard; None: each shard has one owner
    factors: FactorElements = FactorElements()  # of the gradients that travel as two factors
    single: Wire | None = None  # `whole`, with the link of one rank alone, where some are parameter servers


class GradientSync(NamedTuple):
    """How gradients and weights travel on the data axis: ZeRO stage, micro-batches a step, bytes an element, elements of a bucket."""

    zero: int
    micros: int
    weight: int
    gradient: int
    stepped: int  # bytes of a weight that the optimizer steps, where workers average it
    bucket: int
    algorithm: str
    scatters: bool  # ZeRO 1 and 2 reduce-scatter gradients; else they all-reduce them
    reused: int  # elements, the last of forward, that backward finds still gathered at ZeRO 3
    gather_hides: bool  # the gather of stepped weights may hide under forward
    overlap: bool
    copies_hide: bool  # owners of the same shard sum it under backward
    often: bool  # gradients travel at every micro-batch, so that no rank holds more than its shard
    updates: int  # updates of the weights in a step: several where a pipeline without a flush updates them after each micro-batch
    every: int  # steps from one mean of the workers' weights to the next, where there are several workers
    staleness: int = 0  # steps that pass before a sum of gradients is used
    inner: int = 1  # ranks that sum gradients among themselves before the nodes do; 1: all do at once
    servers: int = 0  # ranks that sum gradients and step weights for all; 0: none is a parameter server
    rank: int = 0  # columns of the two factors as which a matrix of gradients travels; 0: all gradients travel whole


class DataMessages(NamedTuple):
    """Messages of the data axis on one rank: `parts` of them in a round, `rounds` a step, each round under one pass of a stage."""

    verb: str
    payload: int  # bytes
    parts: int
    rounds: int
    sent: int  # bytes of one message
    link: str
    seconds: float  # of a round
    least: float  # seconds of a round that are exposed even under the longest pass
    under_forward: bool  # else under backward
    every: int = 1  # steps from one that has them to the next
    late: bool = False  # a whole step hides a round, instead of one pass; each step sends one, however late its sum is used
    in_step: bool = False  # a copy that the optimizer's step makes, whose seconds are the step's
    on_ranks: tuple[int, int] | None = None  # parts of a round that a parameter server sends, and another rank; None: all alike

    def exposed_seconds(self, forward: float, backward: float, step: float) -> float:
        """Exposed seconds a step, under passes of so many seconds, or all passes of a step; they slow down by what they hide."""
        if self.in_step:
            return self.least * self.rounds
        passing = step if self.late else forward if self.under_forward else backward
        return max(self.least, self.seconds - passing * (1 - CONTENTION)) * self.rounds / self.every


def data_messages(shards: ZeroShards, sync: GradientSync, layers: int) -> list[DataMessages]:
    """The messages of one step; ZeRO-3 gathers in as many parts as there are layers."""
    if shards.elements + shards.frozen * (sync.zero == 3) == 0 or shards.whole.size == 1:
        return []
    if sync.servers and shards.single:
        return _server_messages(shards, shards.single, sync)
    if sync.inner > 1 and shards.copies:
        return _level_messages(shards, shards.copies, sync)
    if sync.zero == 0 or shards.shard.size == 1:
        return _sums(shards, sync)
    gathered = shards.elements + shards.frozen  # at ZeRO 3
    gradients, weights = shards.elements * sync.gradient, shards.elements * sync.weight
    buckets = -(-shards.elements // sync.bucket)
    if sync.zero == 3:
        again = max(0, gathered - sync.reused) * sync.weight
        found = [
            _messages("all_gather", gathered * sync.weight, layers, sync.micros, shards.shard, sync, "forward"),
            *([_messages("all_gather", again, layers, sync.micros, shards.shard, sync, "backward")] if again else []),
            _messages("reduce_scatter", gradients, layers, sync.micros, shards.shard, sync, "backward"),
        ]
    else:
        rounds = sync.micros if sync.often else sync.updates
        verb = "reduce_scatter" if sync.scatters else "all_reduce"
        found = [
            _used_late(_messages(verb, gradients, buckets, rounds, shards.shard, sync, "backward"), sync),
            _messages("all_gather", weights, buckets, sync.updates, shards.shard, sync, "forward" if sync.gather_hides else ""),
        ]
    if shards.copies is not None:
        parts = max(1, layers) if sync.copies_hide and sync.zero == 3 else 1
        under: Pass = "backward" if sync.copies_hide else ""
        found.append(_messages("all_reduce", -(-gradients // shards.shard.size), parts, sync.updates, shards.copies, sync, under))
    return found


def _sums(shards: ZeroShards, sync: GradientSync) -> list[DataMessages]:
    """The sums of gradients. Some may travel as two factors: the right ones are made of the summed left ones, once a backward ends."""
    factors = shards.factors
    rows: list[tuple[int, int, Pass]] = [  # elements, those of its buckets, the pass
        (shards.elements - factors.matrices, shards.elements - factors.matrices, "backward"),
        (factors.left, factors.matrices, "backward"),
        (factors.right, factors.matrices, ""),
    ]
    return [
        _used_late(_messages("all_reduce", sent * sync.gradient, -(-filled // sync.bucket), sync.updates, shards.whole, sync, under), sync)
        for sent, filled, under in rows
        if sent
    ]


def _level_messages(shards: ZeroShards, apart: Wire, sync: GradientSync) -> list[DataMessages]:
    """Sums in two levels: each rank of a node sums a part of the gradients, the nodes sum the parts, and a node gathers them again. What
    follows the first message has no backward left to hide under."""
    buckets, bytes_of_sums = -(-shards.elements // sync.bucket), shards.elements * sync.gradient
    return [
        _messages("reduce_scatter", bytes_of_sums, buckets, sync.updates, shards.shard, sync, "backward"),
        _messages("all_reduce", -(-bytes_of_sums // sync.inner), buckets, sync.updates, apart, sync, ""),
        _messages("all_gather", bytes_of_sums, buckets, sync.updates, shards.shard, sync, ""),
    ]


def _server_messages(shards: ZeroShards, wire: Wire, sync: GradientSync) -> list[DataMessages]:
    """Gradients to the parameter servers, which hide as sums do, and the weights that those have stepped to all ranks, which nothing hides.
    A server sends its gradients to the others and its weights to all; another rank sends gradients alone."""
    gradients = _exchange(shards.elements * sync.gradient, (sync.servers - 1, sync.servers), shards, wire, sync)
    weights = _exchange(shards.elements * sync.weight, (wire.size - 1, 0), shards, wire, sync)
    if sync.overlap:
        one = gradients.seconds / -(-shards.elements // sync.bucket)
        gradients = gradients._replace(least=max(one, gradients.seconds * CONTENTION))
    return [_used_late(gradients, sync), weights]


def _exchange(total: int, sends: tuple[int, int], shards: ZeroShards, wire: Wire, sync: GradientSync) -> DataMessages:
    """`total` bytes to or from parameter servers. For each bucket a server sends to so many ranks, and another rank to so many."""
    buckets = -(-shards.elements // sync.bucket)
    payload = -(-total // (buckets * sync.servers))
    seconds = buckets * server_seconds(payload * sync.servers, sync.servers, wire)
    of_server, of_other = (buckets * each for each in sends)
    return DataMessages(
        verb="send",
        payload=payload,
        parts=max(of_server, of_other),
        rounds=sync.updates,
        sent=payload,
        link=wire.link,
        seconds=seconds,
        least=seconds,
        under_forward=False,
        on_ranks=(of_server, of_other),
    )


def averaging_messages(shards: ZeroShards, apart: Wire, sync: GradientSync) -> list[DataMessages]:
    """The messages by which workers average their float32 weights, over the ranks `apart` that step the same ones: in one of sync.every
    steps, under no pass. Where ZeRO shards the weights, their copies are gathered again."""
    sharded = sync.zero > 0 and shards.shard.size > 1
    stepped = -(-shards.elements // shards.shard.size) if sharded else shards.elements
    if not stepped:
        return []
    found = [_messages("all_reduce", stepped * sync.stepped, -(-stepped // sync.bucket), 1, apart, sync, "")]
    if sharded and sync.zero < 3:
        found.append(_messages("all_gather", shards.elements * sync.weight, -(-shards.elements // sync.bucket), 1, shards.shard, sync, ""))
    return [each._replace(every=sync.every) for each in found]


def one_message(verb: str, payload: int, wire: Wire, sync: GradientSync) -> DataMessages:
    """One message a step, under no pass."""
    return _messages(verb, payload, 1, 1, wire, sync, "")


def _messages(verb: str, total: int, parts: int, rounds: int, wire: Wire, sync: GradientSync, under: Pass) -> DataMessages:
    """`total` bytes in `parts` messages, `rounds` times a step, each round under a pass of computation or under none.

    All parts but one may hide, as far as there is computation to hide under.
    """
    payload = -(-total // parts)
    sent, seconds = collective_cost(verb, payload, wire, sync.algorithm)
    in_round = seconds * parts
    least = max(seconds, in_round * CONTENTION) if sync.overlap and under else in_round
    return DataMessages(verb, payload, parts, rounds, sent, wire.link, in_round, least, under == "forward")


def _used_late(sums: DataMessages, sync: GradientSync) -> DataMessages:
    """The same sums of gradients, which hide under a whole step where they are used some steps later."""
    return sums._replace(late=True, least=sums.seconds * CONTENTION) if sync.staleness else sums


def traffic_row(messages: DataMessages, forward: float, backward: float, step: float, *, on_server: bool | None = None) -> TrafficRow:
    """The traffic of one step, under passes of so many seconds, which are `step` seconds in all: of a rank that is a parameter server, of
    one that is not, or (None) of whichever sends most of these messages."""
    parts = messages.parts if on_server is None or messages.on_ranks is None else messages.on_ranks[0 if on_server else 1]
    count, exposed = parts * messages.rounds, messages.exposed_seconds(forward, backward, step)
    seconds = messages.seconds * messages.rounds / messages.every
    sent = messages.sent * count // messages.every
    axis = HOST if messages.link == HOST else "dp"
    return TrafficRow(axis, messages.verb, messages.payload, count, sent, messages.link, seconds, exposed, messages.every)
