"""Whether a run can resume from the checkpoints in its folder, by `checkpoint.resume` and by what has changed since."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..spec.numbers.as_text import plural
from ..spec.problem import Problem, suggest_name
from ..spec.run import Run
from .absolute_paths import with_absolute_paths
from .checkpoints import SavedStep, checkpoints_folder, newest_saved
from .metric_rows import read_step_rows
from .read_files import whole_number
from .resume_changes import Changes, acceptable_keys, compare_runs
from .run_in_manifest import CONFIG_KEY, read_hf_config, read_run_file, run_from_record

Mode = Literal["auto", "must", "never"]


@dataclass(frozen=True, kw_only=True)
class ResumeCheck:
    """A resume as judged before any rank starts: the checkpoint (None: the run begins anew), problems, remarks."""

    saved: SavedStep | None
    problems: tuple[Problem, ...]
    remarks: tuple[str, ...] = ()


def check_resume(run: Run, folder: Path, *, data_key: str | None = None) -> ResumeCheck:
    """Judge whether a run can resume from RUN_DIR's newest checkpoint; `data_key` identifies the run's tokens, if known.

    A checkpoint of an earlier version does not name the run that saved it: RUN_DIR/run.json is used instead.
    """
    checkpoints = checkpoints_folder(folder)
    saved, passed = newest_saved(checkpoints)
    problem = resume_mode_problem(checkpoints, run.checkpoint.resume, saved.path if saved else None, passed)
    problems = (*unacceptable_key_problems(run), *((problem,) if problem else ()))
    if problems or saved is None:
        return ResumeCheck(saved=saved, problems=problems, remarks=tuple(_lost_steps(folder)) if saved is None else ())
    before, remarks = run_from_record(saved.extra), list[str]()
    recorded = before is not None
    if before is None and (before := read_run_file(folder / "run.json")) is not None:
        remarks.append(f"{saved.path.name} was written by an earlier version and does not name its run: run.json is used instead")
    changes = compare_with_saved(before, run, saved, data_key) if before else Changes()
    if not recorded:  # the ranks report it otherwise; here they would find the new run.json
        remarks += changes.remarks(saved.step)
    return ResumeCheck(saved=saved, problems=changes.problems, remarks=tuple(remarks))


def _lost_steps(folder: Path) -> Iterator[str]:
    """Say that a run begins again which has logged steps, as that of a folder that was copied without its checkpoints."""
    steps = max((step for row in read_step_rows(folder) if (step := whole_number(row.get("step"))) is not None), default=0)
    if steps:
        yield f"{folder} has logged {plural(steps, 'step')} and no checkpoint to go on from: the run begins again at step 0"


def unacceptable_key_problems(run: Run) -> Iterator[Problem]:
    """Yield the keys of `checkpoint.accept` that can't be accepted."""
    known = acceptable_keys()
    for key in run.checkpoint.accept:
        if key not in known:
            yield Problem(rule="accept", says=f"checkpoint.accept=[{key}] is not a key that can be accepted", mend=suggest_name(key, known))


def compare_with_saved(before: Run, run: Run, saved: SavedStep, data_key: str | None) -> Changes:
    """Judge what changed since the run `before` saved a checkpoint."""
    key = saved.extra.get("data", {}).get("key")
    same = None if key is None or data_key is None else key == data_key
    configs = saved.extra.get(CONFIG_KEY, {}), read_hf_config(run)
    return compare_runs(
        before, with_absolute_paths(run), step=saved.step, samples=saved.extra.get("samples"), same_data=same, configs=configs
    )


def resume_mode_problem(folder: Path, mode: Mode, newest: Path | None, passed: tuple[str, ...]) -> Problem | None:
    """Return why `checkpoint.resume` contradicts a folder of checkpoints. `newest` is the newest one that verifies; `passed` says why newer
    ones do not."""
    reasons = "; ".join(passed)
    match mode:
        case "never" if newest:
            says = f"checkpoint.resume=never, but {newest} exists"
            return Problem(rule="resume", says=says, mend="set checkpoint.resume=auto to go on from it, or log.dir to another folder")
        case "must" if newest is None:
            says = f"checkpoint.resume=must, but no checkpoint in {folder} verifies" + (f" ({reasons})" if reasons else "")
            return Problem(rule="resume", says=says, mend="name a run that has saved one, or set checkpoint.resume=auto")
        case "auto" if newest is None and reasons:
            says = f"no checkpoint in {folder} verifies ({reasons})"
            return Problem(rule="resume", says=says, mend="restore one of them, or set name=NEW to train another run")
        case _:
            return None
