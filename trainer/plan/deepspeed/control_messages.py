"""Control messages of a step under DeepSpeed 0.19's engines: the loop's own, and those with which DeepSpeed takes norms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod

from ...spec.run import Run
from ..axes.weight_slices import WeightShard
from ..costs.control_message import ControlMessage, counts_of_routing, further_losses, routing_messages
from ..costs.precision import MASTER_BYTES, widths
from ..layout.mesh import Mesh
from .defaults import SUBGROUP
from .memory import effective_stage

FLAG_BYTES, FLOAT32_BYTES, WIDE_BYTES = 1, 4, 8  # bytes of an overflow flag, a float32, an int64 or a float64


def control_messages(run: Run, mesh: Mesh, held: Sequence[WeightShard], layers: int) -> tuple[ControlMessage, ...] | None:
    """The control messages of a step on a rank that holds these weight shards and so many layers with experts, on whatever group they go.

    None for fp16: a step whose gradients overflow takes no norm.
    """
    if run.train.precision == "fp16":
        return None
    rows = (*_loop_messages(run, mesh), *_norm_messages(run, mesh, held))
    own = (ControlMessage(verb=verb, payload=payload, count=count, says=says) for verb, payload, count, says in rows if count)
    return (*own, *routing_messages(run, mesh, layers))


Row = tuple[str, int, int, str]  # verb, bytes, count, words


def _loop_messages(run: Run, mesh: Mesh) -> Iterator[Row]:
    """What the loop and our engines send."""
    is_parallel = int(mesh.world > 1)
    yield "all_reduce", FLOAT32_BYTES, is_parallel, "finite check"
    losses = 1 + further_losses(run)
    yield "all_reduce", losses * WIDE_BYTES, is_parallel if _is_pipe(run, mesh) else int(mesh.size("data") > 1), "loss"
    if run.data.documents:
        yield "all_reduce", WIDE_BYTES, is_parallel, "label count"
    if counts := counts_of_routing(run):
        yield "all_reduce", counts * WIDE_BYTES, is_parallel, "counts of routing"


def _norm_messages(run: Run, mesh: Mesh, held: Sequence[WeightShard]) -> Iterator[Row]:
    """The gradient norm: at ZeRO 0 ours, over the ranks of a replica; else DeepSpeed's, one for each parameter group."""
    width = widths(run)
    stage = effective_stage(run.parallel.zero, half=width.weight < MASTER_BYTES, ep=mesh.ep)
    data, model = int(mesh.size("data") > 1), int(mesh.world > mesh.size("data"))
    trained = [each for each in held if run.model.is_trained(each.name)]
    if stage == 0:
        yield "all_reduce", WIDE_BYTES, model, "gradient norm"
    elif stage == 1 and width.gradient > width.weight:
        yield from _wide_gradient_norms(mesh, model, has_experts=any(each.expert for each in trained))
    elif stage == 3:
        bytes_of_norm = FLOAT32_BYTES if run.parallel.offload.optimizer else WIDE_BYTES
        yield "all_reduce", bytes_of_norm, _subgroups(trained, mesh.size("data")) * (data + model), "gradient norm"
    else:
        if width.weight < MASTER_BYTES:
            yield "all_reduce", FLAG_BYTES, data + model, "overflow flag"
        groups = {(each.decays, each.expert) for each in trained}
        yield "all_reduce", FLOAT32_BYTES, len(groups) * (data + model), "gradient norm"
        copies = any(each.expert for each in trained) and mesh.size("expert_copies") > 1
        yield "all_reduce", FLOAT32_BYTES, int(copies), "mean of the experts' norm"


def _wide_gradient_norms(mesh: Mesh, model: int, *, has_experts: bool) -> Iterator[Row]:
    """bf16 with float32 gradients at ZeRO 1, where each rank keeps all gradients: sums over the ranks of a replica, and over those that
    share out the experts."""
    yield "all_reduce", FLOAT32_BYTES, model, "gradient norm"
    if has_experts:
        over_replica = model if mesh.tp > 1 else int(mesh.pp > 1)
        yield "all_reduce", FLOAT32_BYTES, over_replica + int(mesh.ep > 1), "norm of the experts"


def _subgroups(trained: Sequence[WeightShard], ranks: int) -> int:
    """The groups of at least SUBGROUP elements of a rank's part in which ZeRO 3 steps: of weights that decay, and of others."""
    count = 0
    for decays in (True, False):
        parts = [-(-prod(each.size) // ranks) for each in trained if each.decays is decays]
        totals = accumulate(parts, lambda total, part: (total if total < SUBGROUP else 0) + part)
        full = sum(total >= SUBGROUP for total in list(totals)[:-1])
        count += full + bool(parts)
    return count


def _is_pipe(run: Run, mesh: Mesh) -> bool:
    return mesh.pp > 1 or run.engine == "pipe"
