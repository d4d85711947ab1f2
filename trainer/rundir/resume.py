"""Whether a run may go on from what its folder holds, as `checkpoint.resume` and what it changed since decide, judged without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..spec.problem import Problem, suggest_name
from ..spec.run import Run
from .changes import Changes, acceptable_keys, compare
from .checkpoints import SavedStep, newest_saved
from .record import CONFIG, read_config, read_run_file, recorded_run

Mode = Literal["auto", "must", "never"]


@dataclass(frozen=True, kw_only=True)
class ResumeCheck:
    """What is known of a resume before any rank is started: the checkpoint (None: the run begins anew), problems, remarks."""

    saved: SavedStep | None
    problems: tuple[Problem, ...]
    remarks: tuple[str, ...] = ()


def check_resume(run: Run, folder: Path, *, data_key: str | None = None) -> ResumeCheck:
    """Judge whether a run may go on from RUN_DIR's newest checkpoint; `data_key` names the run's tokens, where it is known.

    A checkpoint of an earlier version does not say which run saved it: RUN_DIR/run.json is taken for that.
    """
    saved, passed = newest_saved(folder / "checkpoints")
    problem = mode_problem(folder / "checkpoints", run.checkpoint.resume, saved.path if saved else None, passed)
    problems = (*accept_problems(run), *((problem,) if problem else ()))
    if problems or saved is None:
        return ResumeCheck(saved=saved, problems=problems)
    before, remarks = recorded_run(saved.extra), list[str]()
    recorded = before is not None
    if before is None and (before := read_run_file(folder / "run.json")) is not None:
        remarks.append(f"{saved.path.name} does not name the run that saved it, as earlier versions wrote it: run.json is taken for it")
    changes = compare_saved(before, run, saved, data_key) if before else Changes()
    if not recorded:  # ranks say it otherwise; they will find a run.json that is this run's
        remarks += changes.remarks(saved.step)
    return ResumeCheck(saved=saved, problems=changes.problems, remarks=tuple(remarks))


def accept_problems(run: Run) -> Iterator[Problem]:
    """Name the keys of `checkpoint.accept` that can't be accepted."""
    known = acceptable_keys()
    for key in run.checkpoint.accept:
        if key not in known:
            yield Problem(rule="accept", says=f"checkpoint.accept=[{key}] is no key that can be accepted", mend=suggest_name(key, known))


def compare_saved(before: Run, run: Run, saved: SavedStep, data_key: str | None) -> Changes:
    """Judge what a run has changed since the run `before` saved a checkpoint."""
    key = saved.extra.get("data", {}).get("key")
    same = None if key is None or data_key is None else key == data_key
    return compare(before, run, step=saved.step, same_data=same, configs=(saved.extra.get(CONFIG, {}), read_config(run)))


def mode_problem(folder: Path, mode: Mode, newest: Path | None, passed: tuple[str, ...]) -> Problem | None:
    """Say why `checkpoint.resume` does not go with a folder of checkpoints: its newest that verifies, and why newer ones don't."""
    reasons = "; ".join(passed)
    match mode:
        case "never" if newest:
            says = f"checkpoint.resume=never and {newest} is there"
            return Problem(rule="resume", says=says, mend="set checkpoint.resume=auto to go on from it, or log.dir to another folder")
        case "must" if newest is None:
            says = f"checkpoint.resume=must and no checkpoint in {folder} verifies" + (f" ({reasons})" if reasons else "")
            return Problem(rule="resume", says=says, mend="give the folder of a run that was saved, or set checkpoint.resume=auto")
        case "auto" if newest is None and reasons:
            says = f"no checkpoint in {folder} verifies ({reasons})"
            return Problem(rule="resume", says=says, mend="restore one of them, or set checkpoint.resume=never to begin anew")
        case _:
            return None
