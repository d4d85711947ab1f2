"""The choice of the checkpoint that a run resumes from, under the policy `checkpoint.resume`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ...launch.rank.channel import OnProgress, ignore_text
from ...rundir.resume import Mode, resume_mode_problem
from ...rundir.resume_changes import Changes
from ...spec.problem import Problem, Unreadable
from .find import CheckpointSearch, SavedCheckpoint, find_newest
from .load import shape_text
from .publish import latest_checkpoint, point_latest, remove_leftovers
from .slices import Sizes
from .work_on_all_ranks import Gather, gather_alone


def choose_checkpoint(
    folder: Path,
    mode: Mode,
    weights: Mapping[str, Sizes],
    changes_since: Callable[[SavedCheckpoint], Changes] = lambda checkpoint: Changes(),
    *,
    quick: bool = False,
    rank: int = 0,
    world: int = 1,
    gather: Gather = gather_alone,
    on_progress: OnProgress = ignore_text,
) -> CheckpointSearch:
    """Choose the checkpoint that a run of these weights (name: logical shape) resumes from; None in the result: the run starts anew.

    All ranks of the run that writes to the folder call this: it removes what killed saves have left and corrects `latest`.
    `changes_since` compares the run with the one that saved a checkpoint. Raises Unreadable where the mode and the folder contradict
    each other, or the checkpoint is of another model, other data or another optimizer.
    """
    if rank == 0:
        remove_leftovers(folder)
    found = find_newest(folder, quick=quick or mode == "never", rank=rank, world=world, gather=gather, on_progress=on_progress)
    if problems := _resume_problems(folder, mode, weights, changes_since, found):
        raise Unreadable(problems)
    if rank == 0 and found.checkpoint and latest_checkpoint(folder) != found.checkpoint.path:
        with suppress(OSError):  # `latest` is for people: if a full disk prevents the change, the run still resumes
            point_latest(found.checkpoint.path)
    return found


def _resume_problems(
    folder: Path, mode: Mode, weights: Mapping[str, Sizes], changes_since: Callable[[SavedCheckpoint], Changes], found: CheckpointSearch
) -> tuple[Problem, ...]:
    """Return why a run can't resume. Changed keys come before shapes, which follow from them."""
    if refusal := resume_mode_problem(folder, mode, found.checkpoint.path if found.checkpoint else None, found.passed):
        return (refusal,)
    if found.checkpoint is None:
        return ()
    if problems := changes_since(found.checkpoint).problems:
        return problems
    problem = _model_problem(found.checkpoint, weights)
    return (problem,) if problem else ()


def _model_problem(checkpoint: SavedCheckpoint, weights: Mapping[str, Sizes]) -> Problem | None:
    """Return the first difference between the weights of a checkpoint and those of the model."""
    stored = {name: row.shape for (name, kind), row in checkpoint.manifest.rows().items() if kind == "weight"}
    mend = "use the recipe that saved it, or set log.dir to another folder"
    for name, shape in weights.items():
        if name not in stored:
            return Problem(rule="resume", says=f"{checkpoint.path} holds no weight {name}, which this model has", mend=mend)
        if stored[name] != tuple(shape):
            says = f"{name} is {shape_text(stored[name])} in {checkpoint.path} and {shape_text(tuple(shape))} in this model"
            return Problem(rule="resume", says=says, mend=mend)
    for name in stored:
        if name not in weights:
            return Problem(rule="resume", says=f"{checkpoint.path} holds a weight {name}, which this model does not have", mend=mend)
    return None
