"""Rules of how the data axis sums gradients (`parallel.staleness`)."""

from __future__ import annotations

from collections.abc import Iterator

from ...spec.run import Parallel, Run
from .broken_rule import BrokenRule


def staleness_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Sums that are used late travel while the device computes, and some are used before the run ends."""
    steps = run.train.steps
    if steps is not None and parallel.staleness >= steps:
        says = f"parallel.staleness={parallel.staleness} is not below train.steps={steps}: no sum of gradients would be used in a step"
        yield BrokenRule("staleness", says, ((("parallel.staleness", min(1, steps - 1)),), (("train.steps", 2 * parallel.staleness),)))
    elif parallel.staleness and not parallel.overlap.data:
        says = f"parallel.staleness={parallel.staleness} hides the sums of gradients, which parallel.overlap.data=false exposes"
        yield BrokenRule("staleness", says, ((("parallel.overlap.data", True),), (("parallel.staleness", 0),)))
