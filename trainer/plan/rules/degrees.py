"""Numbers that several rules need: degrees near one that does not divide, replicas, micro-batches."""

from __future__ import annotations

from heapq import nsmallest

from ...spec.changed_run import Change
from ...spec.numbers.divisors import divisors
from ...spec.run import Parallel, Run
from ..layout.mesh import replica_size


def nearest_divisors(key: str, value: int, of: int) -> tuple[Change, ...]:
    """Return the divisors of `of` nearest to a value as changes, the smaller first."""
    ranked = nsmallest(3, divisors(of), key=lambda each: (abs(each - value), each))
    return tuple(((key, each),) for each in ranked)


def micro_batches(run: Run, parallel: Parallel, microbatch: int) -> int | None:
    dp = replicas(run, parallel)
    return run.train.batch // (dp * microbatch) if dp and run.train.batch % (dp * microbatch) == 0 else None


def replicas(run: Run, parallel: Parallel) -> int | None:
    if parallel.dp != "auto":
        return parallel.dp
    ranks, others = run.cluster.nodes * run.cluster.gpus, replica_size(parallel)
    return ranks // others if ranks % others == 0 else None
