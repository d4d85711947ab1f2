"""The runs of a proof beside its layouts: one process with other micro-batches, and a layout that resumes what another one saved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from ...plan.plan import make_plan
from ...rundir.checkpoints import checkpoints_folder, step_path
from ...rundir.metric_rows import read_step_rows
from ...spec.derived.batch_levels import common_divisor
from ...spec.numbers.divisors import divisors
from .trial import Trial


def control_trial(reference: Trial, *, check: bool) -> Trial | None:
    """One process with other micro-batches, whose departure shows how rounding grows in this recipe; None if no others divide the batch.

    With `check` it is judged too.
    """
    run = reference.run
    sizes = [size for size in divisors(common_divisor(run.train)) if size != run.train.microbatch]
    size = max((each for each in sizes if each < run.train.microbatch), default=min(sizes, default=0))
    if not size:
        return None
    run = replace(run, name="dp1.again", train=replace(run.train, microbatch=size))
    return Trial(layout=reference.layout, run=run, plan=make_plan(run), check="microbatch" if check else "")


def resume_trials(trials: Sequence[Trial], steps: int) -> tuple[Trial | None, Trial | None]:
    """(the trial with most ranks, that saves midway too; of those with fewest, the one least like it, that resumes from there).

    None and None for one step or one layout. Layouts that train another curve are left out.
    """
    trials = [each for each in trials if not each.layout.has_other_curve]
    if steps < 2 or not trials:  # a step before the save, and one after it
        return None, None
    saver = max(trials, key=lambda each: (each.layout.ranks, each.run.parallel.zero))
    choices = saver.layout.choices
    others = [each for each in trials if each is not saver]
    if not others:
        return None, None
    other = max(others, key=lambda each: (-each.layout.ranks, sum(a != b for a, b in zip(choices, each.layout.choices, strict=True))))
    midway = replace(saver.run, checkpoint=replace(saver.run.checkpoint, every=midway_step(steps), keep=2))
    run = replace(other.run, name=f"{other.run.name}.resumed", checkpoint=replace(other.run.checkpoint, resume="must"))
    return replace(saver, run=midway), replace(other, run=run, check="resume")


def midway_step(steps: int) -> int:
    """The step after which one layout saves and another one resumes."""
    return -(-steps // 2)


def move_midway_checkpoint(saver: Trial, resume: Trial, steps: int) -> None:
    """Move what one run saved midway, with its metrics up to there, to the run folder of the one that resumes."""
    step = midway_step(steps)
    source = step_path(checkpoints_folder(saver.folder), step)
    if not source.is_dir():
        return  # the run that resumes says that it has no checkpoint
    target = step_path(checkpoints_folder(resume.folder), step)
    target.parent.mkdir()
    source.rename(target)
    rows = (f"{json.dumps(row)}\n" for row in read_step_rows(saver.folder) if row["step"] <= step)
    (resume.folder / "metrics.jsonl").write_text("".join(rows), encoding="utf-8")
