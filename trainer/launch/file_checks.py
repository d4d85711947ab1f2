"""TODO."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..models.families import is_made_by_transformers
from ..plan.result import Plan
from ..spec.number_text import count_text
from ..spec.problem import Problem, Unreadable
from ..spec.run import Run
from .data_survey import DataFacts, are_local, names_files, survey_data

WOULD_REFUSE = "`fit` would refuse this here"  # prefix of a plan's warnings about this machine


# Epochs from which repeated tokens teach less and less: up to 4 are nearly as good as new ones (arXiv:2305.16264).
MANY_EPOCHS = 4.0


@dataclass(frozen=True, kw_only=True)
class FileCheck:
    """What a run's files say: `problems` stop it; `remarks` are lines for the user; `data` is None where nothing is known of them."""

    problems: tuple[Problem, ...] = ()
    remarks: tuple[str, ...] = ()
    data: DataFacts | None = None


@dataclass(kw_only=True)
class FileChecks:
    """Looks at the files of runs, at the same data once."""

    _looks: dict[str, DataFacts | tuple[Problem, ...]] = field(default_factory=dict)

    def look(self, run: Run) -> FileCheck:
        """Say what is wrong with a run's files, without reading all of its data."""
        found = self._data(run) if names_files(run) and are_local(run) else ()
        data, problems = (found, ()) if isinstance(found, DataFacts) else (None, found)
        return _with_resume(run, FileCheck(problems=(*problems, *weight_problems(run)), data=data))

    def _data(self, run: Run) -> DataFacts | tuple[Problem, ...]:
        at = repr((run.data, run.model.vocab, run.train.seq, run.launch.name))
        if at not in self._looks:
            try:
                self._looks[at] = survey_data(run, "look")
            except Unreadable as error:
                self._looks[at] = error.problems
        return self._looks[at]


def prepare_files(run: Run, progress: Callable[[str], None]) -> FileCheck:
    """Read all of a run's data into the cache where its ranks are to be on this machine, and say what is wrong with its files."""
    check = FileCheck()
    if run.data.name != "synthetic" and run.launch.name == "local":
        try:
            data = survey_data(run, "prepare", progress)
            check = FileCheck(data=data, remarks=data.remarks)
        except Unreadable as error:
            return FileCheck(problems=error.problems)
    return _with_resume(run, check)


def _with_resume(run: Run, check: FileCheck) -> FileCheck:
    """Add whether the run may go on from its folder's newest checkpoint."""
    from ..rundir.files import run_folder
    from ..rundir.resume import check_resume

    folder = run_folder(run)
    resume = check_resume(run, folder, data_key=check.data.key if check.data else None)
    problems = (*check.problems, *resume.problems, *_metrics_problems(folder))
    return replace(check, problems=problems, remarks=(*check.remarks, *resume.remarks))


def _metrics_problems(folder: Path) -> Iterator[Problem]:
    """Say that RUN_DIR/metrics.jsonl can't be written to, where it is something else than a file."""
    file = folder / "metrics.jsonl"
    if os.path.lexists(file) and not file.is_file():
        yield Problem(rule="folder", says=f"{file} is no plain file, and a run logs its figures there", mend="move it away")


def weight_problems(run: Run) -> Iterator[Problem]:
    """Say why a run can't begin from the weights it names; one that goes on from a checkpoint needs none."""
    from ..rundir.files import run_folder

    if run.model.weights is None or is_made_by_transformers(run.model) or any(run_folder(run).glob("checkpoints/step_*")):
        return
    from ..models.hf_format.folder import check_folder

    try:
        check_folder(Path(run.model.weights), run)
    except Unreadable as error:
        yield from error.problems


def epoch_warnings(run: Run, plan: Plan, data: DataFacts | None) -> Iterator[Problem]:
    """Warn where a run reads its data far more often than helps."""
    if data is None or plan.run is None:
        return
    whole = sum(weight for weight, _ in data.sources)
    epochs = max((plan.run.tokens * weight / whole / tokens for weight, tokens in data.sources if tokens), default=0.0)
    if epochs > MANY_EPOCHS and data.train_tokens:
        about = "" if data.exact else "about "
        often = f"{epochs:,.0f} epochs" + (" of one of its sources" if len(data.sources) > 1 else "")
        says = f"the run reads {count_text(plan.run.tokens)} tokens, and the data hold {about}{count_text(data.train_tokens)}: {often}"
        yield Problem(rule="epochs", says=says, mend=f"beyond {MANY_EPOCHS:.0f} they teach less and less (arXiv:2305.16264)")


def with_files(run: Run, plan: Plan, check: FileCheck) -> Plan:
    """Return the plan with what the files say: what `fit` would refuse is a warning here, for the files of a run may lie elsewhere."""
    refused = tuple(replace(each, says=f"{WOULD_REFUSE}: {each.says}") for each in check.problems)
    said = tuple(Problem(rule="data", says=remark) for remark in check.data.remarks) if check.data else ()
    warnings = (*plan.warnings, *refused, *said, *epoch_warnings(run, plan, check.data))
    return replace(plan, warnings=warnings, runnable=plan.runnable and not refused)
