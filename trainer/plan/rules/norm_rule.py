"""Rule of norms: which scales a norm of all heads together has."""

from __future__ import annotations

from collections.abc import Iterator

from ...spec.run import Parallel, Run
from .broken_rule import BrokenRule


def norm_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A norm of the queries and keys of all heads together scales by its weight, not by 1 + its weight."""
    model = run.model
    if model.qk_norm and model.qk_norm_over == "all" and model.norm == "rmsnorm1p":
        says = "model.qk_norm_over=all does not scale by 1 + its weight, as model.norm=rmsnorm1p does"
        yield BrokenRule("norm", says, ((("model.norm", "rmsnorm"),), (("model.qk_norm_over", "head"),)))
