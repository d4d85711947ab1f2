"""One run of a proof, planned, and its run folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...launch.admission import check_start
from ...plan.plan_data import Plan
from ...rundir.files import run_folder, write_launch_files
from ...spec.problem import Problem
from ...spec.run import Run
from .layouts import ProveLayout


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A layout of the recipe, planned."""

    layout: ProveLayout
    run: Run
    plan: Plan
    check: Literal["", "microbatch", "resume"] = ""  # what it checks beside its layout

    @property
    def name(self) -> str:
        """Its name in tables."""
        match self.check:
            case "microbatch":
                return "one process"
            case "resume":
                return f"{self.layout.name} resumed"
        return self.layout.name

    @property
    def folder(self) -> Path:
        """RUN_DIR of this layout."""
        return run_folder(self.run)


def trial_problems(trial: Trial) -> tuple[Problem, ...]:
    """What prevents a trial: a start of its run, and the simulation of a curve of its own."""
    model = trial.run.model
    keys = [*(["model.weights"] if model.weights else []), *(["model.lora.rank"] if model.lora.rank else [])]
    if not (trial.layout.has_other_curve and keys):
        return check_start(trial.run, trial.plan).problems
    says = f"{' and '.join(keys)}: another curve by design is simulated from drawn weights, all of them trained"
    return (*check_start(trial.run, trial.plan).problems, Problem(rule="layouts", says=says, mend=f"leave {' and '.join(keys)} out"))


def write_run_folder(trial: Trial) -> None:
    """Write RUN_DIR/run.json and plan.json, in an empty folder: an earlier run there is removed."""
    if (trial.folder / "run.json").is_file():
        shutil.rmtree(trial.folder)
    trial.folder.mkdir(parents=True, exist_ok=True)
    write_launch_files(trial.run, trial.plan, trial.folder)
