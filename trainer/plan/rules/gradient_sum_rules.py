"""Rules of how the data axis sums gradients (`parallel.staleness`, `parallel.servers`)."""

from __future__ import annotations

from collections.abc import Iterator

from ...spec.numbers.as_text import plural
from ...spec.run import Parallel, Run
from .broken_rule import BrokenRule
from .degrees import replicas


def staleness_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Sums that are used late travel while the device computes, and some are used before the run ends."""
    steps = run.train.steps
    if steps is not None and parallel.staleness >= steps:
        says = f"parallel.staleness={parallel.staleness} is not below train.steps={steps}: no sum of gradients would be used in a step"
        yield BrokenRule("staleness", says, ((("parallel.staleness", min(1, steps - 1)),), (("train.steps", 2 * parallel.staleness),)))
    elif parallel.staleness and not parallel.overlap.data:
        says = f"parallel.staleness={parallel.staleness} hides the sums of gradients, which parallel.overlap.data=false exposes"
        yield BrokenRule("staleness", says, ((("parallel.overlap.data", True),), (("parallel.staleness", 0),)))


def servers_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Parameter servers are data-parallel ranks."""
    dp = replicas(run, parallel)
    if parallel.reduce == "server" and dp is not None and parallel.servers > dp * parallel.cp > 1:
        says = f"parallel.servers={parallel.servers} is more than {plural(dp * parallel.cp, 'data-parallel rank')}"
        yield BrokenRule("servers", says, ((("parallel.servers", dp * parallel.cp),), (("parallel.reduce", "ring"),)))
