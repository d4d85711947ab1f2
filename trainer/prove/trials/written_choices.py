"""What a recipe writes about its layout beside degrees: whether a proof trains it, in words."""

from __future__ import annotations

from collections.abc import Iterator

from ...plan.layout.schedule_of_run import is_file
from ...spec.run import Run
from .layouts import recipe_layout
from .plan_proof import Proof, rank_limit


def written_choices(run: Run) -> tuple[str, ...]:
    """The keys that few users write and that have an effect in this recipe, with their values: `parallel.stages=[1,2]`."""
    return tuple(_choices(run))


def _choices(run: Run) -> Iterator[str]:
    parallel = run.parallel
    if parallel.pp > 1:
        if is_file(parallel.schedule):
            yield f"parallel.schedule={parallel.schedule}"
        if parallel.stages:
            yield f"parallel.stages=[{','.join(map(str, parallel.stages))}]"
    if parallel.zero and parallel.shard != "all":
        yield f"parallel.shard={parallel.shard}"
    own = recipe_layout(run)
    if own and own.compress:
        yield f"parallel.compress.name={parallel.compress.name}"
    if parallel.zero == 3 and parallel.gather != "auto":
        yield f"parallel.gather={parallel.gather}"
    if parallel.sync.every > 1:
        yield f"parallel.sync.every={parallel.sync.every}"
    if own and own.all_to_all:
        yield f"parallel.cp_comm={parallel.cp_comm}"
    if own and (own.servers or own.hierarchical):
        yield f"parallel.reduce={parallel.reduce}"
    yield from (f"parallel.offload.{name}=true" for name in parallel.offload.names)
    if parallel.staleness:
        yield f"parallel.staleness={parallel.staleness}"


def choices_sentence(proof: Proof) -> str:
    """Which layout trains what the recipe writes, or why none does; "" where it writes nothing but degrees."""
    keys = ", ".join(written_choices(proof.recipe))
    if not keys:
        return ""
    own = recipe_layout(proof.recipe)
    if own and own in {each.layout for each in proof.trials}:
        return f"{own.name} trains the recipe's layout as it is written: {keys}"
    return f"not trained: the recipe's {keys}: {_reason(proof)}"


def _reason(proof: Proof) -> str:
    own = recipe_layout(proof.recipe)
    if own is None:
        return "its layout is one process, or does not fill its cluster"
    if problem := next((each.problem for each in proof.skipped if each.layout == own), None):
        return problem.says
    if own.ranks > rank_limit(proof.recipe):
        return f"its layout needs {own.ranks:,} ranks, and a proof has at most {rank_limit(proof.recipe)} here"
    return f"layouts= leaves out {own.name}"
