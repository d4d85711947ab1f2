"""What the installed torch can't do for a run."""

from __future__ import annotations

import re

from ..spec.derived.compiled_layers import has_compiled_layers
from ..spec.problem import Problem
from ..spec.run import Run

COMPILES_MESSAGES = (2, 13)  # the first release of torch whose compiled layers send as uncompiled ones do; 2.11 trains another curve


def compile_problem(run: Run, installed: str) -> Problem | None:
    """Return the problem of compiled layers that send messages with a torch of this version, which gets them wrong; else None."""
    found = re.match(r"(\d+)\.(\d+)", installed)
    axes = [axis for axis in ("tp", "cp", "ep") if getattr(run.parallel, axis) > 1]
    if not axes or not has_compiled_layers(run.train, run.parallel) or not found or tuple(map(int, found.groups())) >= COMPILES_MESSAGES:
        return None
    says = f"train.compile=true with parallel.{axes[0]}={getattr(run.parallel, axes[0])} trains wrongly with torch {installed}"
    return Problem(rule="compile", says=says, mend="set train.compile=false, or install torch 2.13 or later")
