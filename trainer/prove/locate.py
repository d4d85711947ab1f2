"""Where a layout departs first: it is trained again beside one process, module by module, in the steps that may show it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from .finding import Finding, first, read, told
from .fork_client import Crew
from .trials import Trial, written

TRACED = ".traced"  # at the end of the names of such runs
REFERENCE = "reference"  # the folder in which one process writes all that it computes

Train = Callable[[Trial], Crew]


def departure(alone: Trial, trial: Trial, step: int, trained: Train) -> str:
    """The first step, micro-batch, module and rank of a layout that rounding does not explain, in words; raises ServerGone.

    `step` (from 1) is where its curve departs: that one is traced, the one before, which may have moved weights wrongly, and the first.
    """
    steps = sorted({0, max(0, step - 2), step - 1})
    one, again = traced(alone), traced(trial)
    reference = one.folder / REFERENCE
    if not all((reference / f"step_{each}").is_dir() for each in steps) and not _well(one, steps, reference, trained):
        return f"no trace: one process did not train again; its logs are in {one.folder}"
    if not _well(again, steps, reference, trained):
        return f"no trace: it did not train again; its logs are in {again.folder}"
    found = first(_findings(again.folder), trial.run.train.precision)
    numbers = ", ".join(str(each + 1) for each in steps)
    return f"first: {told(found)}" if found else f"traced in step {numbers}: no module departs there by more than rounding"


def cleared(alone: Trial) -> None:
    """Take away what one process wrote for the traces, which is large."""
    shutil.rmtree(traced(alone).folder, ignore_errors=True)


def traced(trial: Trial) -> Trial:
    """The run that is traced, in a folder of its own."""
    return replace(trial, run=replace(trial.run, name=f"{trial.run.name}{TRACED}"))


def _well(trial: Trial, steps: Iterable[int], reference: Path, trained: Train) -> bool:
    """Whether a run went well up to the last of the steps."""
    written(trial)
    (trial.folder / "trace.json").write_text(json.dumps({"steps": list(steps), "reference": str(reference)}), encoding="utf-8")
    return not any(trained(trial).codes)


def _findings(folder: Path) -> list[Finding]:
    """What all ranks found."""
    files = sorted((folder / "departure").glob("*.json"))
    return [finding for file in files for finding in read(json.loads(file.read_text(encoding="utf-8")))]
