"""Workers: the data-parallel ranks that step together where replicas step alone for some steps (`parallel.sync`)."""

from __future__ import annotations

from ...spec.run import Parallel
from .layout import mesh_of
from .mesh import Mesh

OUTER_MOMENTUM = "outer_momentum"  # the kind, in checkpoints, of what the step together keeps beside the weights


def worker_ranks(parallel: Parallel, mesh: Mesh, gpus: int) -> int:
    """Return the ranks of the data axis that sum gradients at each step, on nodes of `gpus` devices: all of them, or those of a worker,
    which is one replica or the replicas of a node."""
    data = mesh.size("data")
    if parallel.sync.every == 1:
        return data
    if parallel.sync.across == "all":
        return mesh.cp
    return mesh.cp * max(1, mesh.in_node("data", gpus) // mesh.cp)


def worker_count(parallel: Parallel, mesh: Mesh, gpus: int) -> int:
    """Return how many workers step alone; 1 where gradients are summed over all ranks at each step."""
    if parallel.sync.every == 1:
        return 1
    return mesh.size("data") // worker_ranks(parallel, mesh, gpus)


def outer_state_bytes(parallel: Parallel) -> int:
    """Return the bytes that the step together keeps for each weight that a rank steps: the float32 weight after the last one, and the
    momentum. The mean of the weights needs neither."""
    outer = parallel.sync.outer
    return 0 if outer.only_averages else 8 if outer.momentum else 4


def outer_momentum_bytes(parallel: Parallel, world: int, gpus: int) -> int:
    """Return the bytes of the outer momentum for each trained weight, of all of `world` ranks together, which checkpoints keep."""
    if parallel.sync.every == 1 or not parallel.sync.outer.momentum:
        return 0
    return 4 if worker_count(parallel, mesh_of(parallel, world), gpus) > 1 else 0
