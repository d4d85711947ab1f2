"""Rules of replicas that step alone (`parallel.sync`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...spec.changed_run import Change
from ...spec.numbers.as_text import plural
from ...spec.run import Parallel, Run
from ..layout.layout import mesh_of
from ..layout.workers import worker_ranks
from .broken_rule import BrokenRule
from .degrees import replicas

TOGETHER: Change = (("parallel.sync.every", 1),)


def agreement_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Evaluations and checkpoints come after steps that workers take together, when all have the same weights."""
    every, steps = parallel.sync.every, run.train.steps  # after its last step a run agrees, whichever that is
    for key, interval in (("train.evaluate.every", run.train.evaluate.every), ("checkpoint.every", run.checkpoint.every)):
        if interval % every and interval != steps:
            says = f"{key}={interval} is not a multiple of parallel.sync.every={every}: workers have other weights then"
            yield BrokenRule("sync", says, (((key, -(-interval // every) * every),), TOGETHER))


def sync_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Workers are alike, and each holds all experts."""
    dp = replicas(run, parallel)
    if parallel.sync.every == 1 or dp is None or dp % parallel.ep:
        return
    parallel = replace(parallel, dp=dp)
    mesh = mesh_of(parallel, run.cluster.nodes * run.cluster.gpus)
    of_worker = worker_ranks(parallel, mesh, run.cluster.gpus) // parallel.cp  # its replicas
    if dp % of_worker:
        says = f"parallel.sync.across=node: {dp} replicas don't divide into nodes that have {of_worker} of them"
        yield BrokenRule("sync", says, ((("parallel.sync.across", "all"),), TOGETHER))
    elif of_worker % parallel.ep:
        says = f"parallel.ep={parallel.ep} does not divide the {plural(of_worker, 'replica')} of a worker, which holds all experts"
        yield BrokenRule("sync", says, ((("parallel.sync.across", "node"),), (("parallel.ep", 1),), TOGETHER))
