"""The packages that a run's model and kernels need on each host, beside those of every run."""

from __future__ import annotations

from ...plan.rules.hybrid_rule import computes_by_fla
from ...spec.run import Run

FLA_PACKAGES = {"fla-core": "fla", "triton": "triton", "einops": "einops"}  # package -> what is imported of it


def needed_packages(run: Run) -> tuple[str, ...]:
    """Return the names of the packages, as pip has them."""
    of_family = ("transformers",) if run.model.family == "hf" else ()
    return (*of_family, *(FLA_PACKAGES if computes_by_fla(run) else ()))
