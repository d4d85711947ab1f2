"""Routes by which gradients are summed other than one collective of all data-parallel ranks: two levels, and parameter servers."""

from __future__ import annotations

from ...spec.run import Parallel
from .mesh import Mesh


def inner_ranks(parallel: Parallel, mesh: Mesh, gpus: int) -> int:
    """Return the ranks of the data axis, on nodes of `gpus` devices, that sum gradients among themselves before the nodes do
    (parallel.reduce=hierarchical); 1 where there are not two levels: such groups lie in one node, or have one rank in each."""
    if parallel.reduce != "hierarchical" or parallel.zero:
        return 1
    ranks, inner = mesh.size("data"), mesh.in_node("data", gpus)
    return inner if inner < ranks and ranks % inner == 0 else 1


def server_count(parallel: Parallel, mesh: Mesh) -> int:
    """Return how many data-parallel ranks are parameter servers (parallel.reduce=server); 0 where none is."""
    ranks = mesh.size("data")
    return min(parallel.servers, ranks) if parallel.reduce == "server" and not parallel.zero and ranks > 1 else 0


def server_ranks(servers: int, ranks: int) -> tuple[int, ...]:
    """Return which of the `ranks` data-parallel ranks are servers, the owner of the first part of each bucket first: spread evenly, so that
    neighbours, which may share a node's links, serve last."""
    return tuple(server * ranks // servers for server in range(servers))
