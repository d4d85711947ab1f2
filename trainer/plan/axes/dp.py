"""Data parallel: gradients added up over the ranks that hold the same weights, and ZeRO's gathers (arXiv:1910.02054).

What travels depends on who trains. The papers' ZeRO-1 and 2 scatter gradients and gather weights: 2 Psi a step.
DeepSpeed 0.19 all-reduces each bucket and then gathers the weights, about 3 Psi; from stage 2 on gradients travel at
every micro-batch, and they are as wide as the weights, whatever they add up in. In a pipeline, where no engine of ours runs
stage 2, gradients add up whole and are scattered once a step, as Llama 3 and MegaScale do (arXiv:2407.21783 section 3.3.2,
2402.15627). ZeRO-3 gathers weights for forward and for backward and scatters gradients: 3 Psi a micro-batch; DeepSpeed keeps
for backward what it gathered for forward of the last 500 M parameters, as counted on live runs.
"""

from __future__ import annotations

from typing import NamedTuple

from ..collectives import Wire, cost
from .traffic_row import Line

# Share of a hidden message's time that the computing beside it loses: its kernels take multiprocessors and memory.
CONTENTION = 0.5
REUSED = 1_000_000_000  # elements within which DeepSpeed keeps what forward gathered for backward (stage3_max_reuse_distance)


class Held(NamedTuple):
    """Parameters of one kind on one rank, and the groups over which they are alike (`whole`) and ZeRO shards them
    (`shard`); `copies` joins the shards' replicas."""

    elements: int
    whole: Wire
    shard: Wire
    copies: Wire | None  # None: each shard has one owner


class Way(NamedTuple):
    """How the data axis works: ZeRO stage, micro-batches, bytes an element, bucket elements, whose pattern, overlap."""

    zero: int
    micros: int
    weight: int
    gradient: int
    bucket: int
    algorithm: str
    deepspeed: bool
    overlap: bool
    often: bool  # gradients travel at every micro-batch, so that no rank holds more than its shard


def lines(held: Held, way: Way, layers: int, forward: float, backward: float) -> list[Line]:
    """The traffic of one kind of parameters in one step.

    `forward` and `backward` are a micro-batch's seconds on the stage, under which messages may hide; ZeRO-3 gathers
    in as many parts as there are layers.
    """
    if held.elements == 0 or held.whole.size == 1:
        return []
    gradients, weights = held.elements * way.gradient, held.elements * way.weight
    buckets = -(-held.elements // way.bucket)
    if way.zero == 0:
        return [_line("all_reduce", gradients, buckets, 1, held.whole, way, backward)]
    if way.zero == 3:
        again = weights if not way.deepspeed else max(0, held.elements - REUSED // 2) * way.weight
        found = [
            _line("all_gather", weights, layers, way.micros, held.shard, way, forward),
            *([_line("all_gather", again, layers, way.micros, held.shard, way, backward)] if again else []),
            _line("reduce_scatter", gradients, layers, way.micros, held.shard, way, backward),
        ]
    else:
        rounds = way.micros if way.often else 1
        verb = "all_reduce" if way.deepspeed else "reduce_scatter"
        found = [
            _line(verb, gradients, buckets, rounds, held.shard, way, backward),
            _line("all_gather", weights, buckets, 1, held.shard, way, 0.0 if way.deepspeed else forward),
        ]
    if held.copies is not None:
        found.append(_line("all_reduce", -(-gradients // held.shard.size), 1, 1, held.copies, way, backward))
    return found


def _line(verb: str, total: int, parts: int, rounds: int, wire: Wire, way: Way, under: float) -> Line:
    """`total` bytes in `parts` messages, `rounds` times a step, each round under so many seconds of computing.

    All but one part may hide, as far as there is computing to hide under.
    """
    payload = -(-total // parts)
    sent, seconds = cost(verb, payload, wire, way.algorithm)
    once = seconds * parts
    exposed = max(seconds, once - under * (1 - CONTENTION), once * CONTENTION) if way.overlap and under else once
    return Line("dp", verb, payload, parts * rounds, sent * parts * rounds, wire.link, once * rounds, exposed * rounds)
