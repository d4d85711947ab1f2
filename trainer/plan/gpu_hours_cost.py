"""What a run costs: GPU-hours times the price of one."""

from __future__ import annotations

from ..spec.run import Cluster


def gpu_hours_cost(cluster: Cluster, seconds: float) -> float | None:
    """The cost of a cluster for so many seconds, in the currency of cluster.price; None where it has no price."""
    if cluster.price is None:
        return None
    return cluster.nodes * cluster.gpus * seconds / 3600 * cluster.price
