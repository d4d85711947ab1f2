"""Problems and remarks about the files of a run before any rank starts: its data, weights and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ..models.families import is_made_by_transformers
from ..plan.plan_data import Plan, WholeRun
from ..plan.warnings import DOCUMENTS_RULE
from ..spec.changed_run import overrides
from ..spec.derived.data_blends import tokens_of_sources
from ..spec.numbers.as_text import count_text
from ..spec.problem import Problem, Unreadable
from ..spec.run import Run
from .data_survey import DataFacts, are_local, names_files, survey_data

WOULD_REFUSE = "`fit` would refuse this here"  # prefix of a plan's warnings about this machine
# Epochs from which repeated tokens teach less and less: up to 4 are nearly as good as new ones (arXiv:2305.16264).
MANY_EPOCHS = 4.0


@dataclass(frozen=True, kw_only=True)
class FileCheck:
    """`problems` prevent the run; `remarks` are lines for the user; `data` is None where nothing is known about the data."""

    problems: tuple[Problem, ...] = ()
    remarks: tuple[str, ...] = ()
    data: DataFacts | None = None


@dataclass(kw_only=True)
class FileChecks:
    """Checks the files of several runs, and looks at the same data only once."""

    _surveys: dict[str, DataFacts | tuple[Problem, ...]] = field(default_factory=dict)

    def check_run(self, run: Run) -> FileCheck:
        """Check a run's files without reading all of its data."""
        found = self._data(run) if names_files(run) and are_local(run) else ()
        data, problems = (found, ()) if isinstance(found, DataFacts) else (None, found)
        return _with_resume(run, FileCheck(problems=(*problems, *weight_problems(run)), data=data))

    def _data(self, run: Run) -> DataFacts | tuple[Problem, ...]:
        key = repr((run.data, run.model.vocab, run.train.seq, run.train.evaluate.every > 0, run.launch.name))
        if key not in self._surveys:
            try:
                self._surveys[key] = survey_data(run, "look")
            except Unreadable as error:
                self._surveys[key] = error.problems
        return self._surveys[key]


def prepare_files(run: Run, progress: Callable[[str], None]) -> FileCheck:
    """Prepare the data of a local run in the cache, reading all of them, and check the run's files."""
    check = FileCheck()
    if run.data.name != "synthetic" and run.launch.name == "local":
        try:
            data = survey_data(run, "prepare", progress)
            check = FileCheck(data=data, remarks=data.remarks)
        except Unreadable as error:
            return FileCheck(problems=error.problems)
    return _with_resume(run, check)


def _with_resume(run: Run, check: FileCheck) -> FileCheck:
    """Add whether the run can resume from its folder's newest checkpoint; what changed since follows once the files are right."""
    from ..rundir.files import run_folder
    from ..rundir.resume import check_resume

    folder = run_folder(run)
    data_key = check.data.key if check.data else None
    resume = check_resume(run, folder, data_key=data_key)
    problems = check.problems or resume.problems
    if data_key and run.data.has_preferences and not problems:
        problems = tuple(weight_problems(run, data_key))
    return replace(check, problems=(*problems, *_metrics_problems(folder)), remarks=(*check.remarks, *resume.remarks))


def _metrics_problems(folder: Path) -> Iterator[Problem]:
    """Yield a problem if RUN_DIR/metrics.jsonl is not a plain file: the run appends to it."""
    file = folder / "metrics.jsonl"
    if os.path.lexists(file) and not file.is_file():
        yield Problem(rule="folder", says=f"{file} is not a plain file, and the run logs its metrics there", mend="move it away")


def weight_problems(run: Run, data_key: str | None = None) -> Iterator[Problem]:
    """Yield why a run can't start from the weights it names. A run that resumes from a checkpoint needs none, unless LoRA adds to them, or
    preferences are relative to them and what they need of them is not kept: of other data than `data_key` identifies, if it is known."""
    from ..rundir.checkpoints import has_checkpoints
    from ..rundir.files import run_folder
    from ..rundir.reference_header import has_whole_reference

    folder = run_folder(run)
    is_kept = not run.model.lora.rank and has_whole_reference(run, folder, data_key)
    resumes = has_checkpoints(folder) and (is_kept or not run.reads_start_weights_again)
    if run.model.weights is None or resumes:
        return
    from ..models.hf_format.check_folder import check_folder, check_same_config

    checks: list[Callable[[], object]] = [partial(check_folder, Path(run.model.weights), run)]
    if is_made_by_transformers(run.model):
        checks = [partial(check_same_config, Path(run.model.weights), run)]
    elif run.model.lora.rank and run.model.lora.weights and not has_checkpoints(folder):
        from ..models.hf_format.adapter_folder import check_adapter

        checks.append(partial(check_adapter, Path(run.model.lora.weights), run))
    for check in checks:
        try:
            check()
        except Unreadable as error:
            yield from error.problems


def epoch_warnings(run: Run, plan: Plan, data: DataFacts | None) -> Iterator[Problem]:
    """Warn if a run repeats its data far more often than helps."""
    if data is None or plan.run is None:
        return
    read = zip(tokens_of_sources(run.data, plan.run.tokens), data.epochs, strict=True)
    epochs = max((tokens / epoch for tokens, epoch in read if epoch), default=0.0)
    if epochs > MANY_EPOCHS and data.train_tokens:
        about = "" if data.exact else "about "
        often = f"{epochs:,.{1 if epochs < 10 else 0}f} epochs" + (" of one of its sources" if len(data.epochs) > 1 else "")
        holds = f"the data hold {about}{count_text(data.train_tokens)}"
        if run.data.has_prompts and len(data.epochs) == 1 and data.epochs[0]:
            holds = f"an epoch has {about}{count_text(data.epochs[0])}, with padding"
        says = f"the run reads {count_text(plan.run.tokens)} tokens, and {holds}: {often}"
        yield Problem(rule="epochs", says=says, mend=f"beyond {MANY_EPOCHS:.0f} they teach less and less (arXiv:2305.16264)")


def with_files(run: Run, plan: Plan, check: FileCheck) -> Plan:
    """Return the plan with warnings from its files. A problem for `fit` is a warning here: the run may be for another machine."""
    refused = tuple(replace(each, says=f"{WOULD_REFUSE}: {each.says}") for each in check.problems)
    said = tuple(Problem(rule="data", says=remark) for remark in check.data.remarks) if check.data else ()
    lengths = check.data.lengths if check.data else ()
    planned = [_with_lengths(each, lengths) if each.rule == DOCUMENTS_RULE and lengths else each for each in plan.warnings]
    warnings = (*planned, *refused, *said, *epoch_warnings(run, plan, check.data))
    return replace(plan, warnings=warnings, runnable=plan.runnable and not refused, run=_with_epochs(plan.run, check.data))


def _with_lengths(warning: Problem, lengths: Sequence[int]) -> Problem:
    """Return the warning of documents of unknown lengths with those of the run's data."""
    settings = overrides([("data.document_tokens", lengths[0] if len(set(lengths)) == 1 else tuple(lengths))])
    return replace(warning, mend=f"set {settings[0]}, as these data have", settings=settings)


def _with_epochs(run: WholeRun | None, data: DataFacts | None) -> WholeRun | None:
    """Return the whole run with how often it reads each path, where that is known."""
    if run is None or data is None or len(run.paths) != len(data.epochs):
        return run
    pairs = zip(run.paths, data.epochs, strict=True)
    return replace(run, paths=tuple(replace(path, epochs=path.tokens / epoch) if epoch else path for path, epoch in pairs))
