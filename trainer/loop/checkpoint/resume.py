"""Where a run goes on from: the policy `checkpoint.resume` over what is in its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ...launch.rank.channel import Pulse, hush
from ...rundir.changes import Changes
from ...rundir.resume import Mode, mode_problem
from ...spec.problem import Problem, Unreadable
from .agreement import Gather, alone
from .find import Checkpoint, Found, newest
from .folder import latest, point, sweep
from .load import times
from .slices import Sizes


def resume(
    folder: Path,
    mode: Mode,
    weights: Mapping[str, Sizes],
    judge: Callable[[Checkpoint], Changes] = lambda checkpoint: Changes(),
    *,
    quick: bool = False,
    rank: int = 0,
    world: int = 1,
    gather: Gather = alone,
    pulse: Pulse = hush,
) -> Found:
    """The checkpoint that a run of these weights (name: whole shape) goes on from; None in it: the run begins anew.

    For the run that writes to the folder, on all of its ranks: what killed saves left is removed, `latest` is mended. `judge` says what
    of the run has changed since a checkpoint was saved. Raises Unreadable where the mode and the folder don't agree, or the checkpoint
    is of another model, other data or another optimizer.
    """
    if rank == 0:
        sweep(folder)
    found = newest(folder, quick=quick or mode == "never", rank=rank, world=world, gather=gather, pulse=pulse)
    if problems := _problems(folder, mode, weights, judge, found):
        raise Unreadable(problems)
    if rank == 0 and found.checkpoint and latest(folder) != found.checkpoint.path:
        with suppress(OSError):  # it is for people: a full disk is no reason not to go on
            point(found.checkpoint.path)
    return found


def _problems(
    folder: Path, mode: Mode, weights: Mapping[str, Sizes], judge: Callable[[Checkpoint], Changes], found: Found
) -> tuple[Problem, ...]:
    """Why a run can't go on; a key that was changed says more than the shape that follows from it."""
    if refusal := mode_problem(folder, mode, found.checkpoint.path if found.checkpoint else None, found.passed):
        return (refusal,)
    if found.checkpoint is None:
        return ()
    if problems := judge(found.checkpoint).problems:
        return problems
    other = _other_model(found.checkpoint, weights)
    return (other,) if other else ()


def _other_model(checkpoint: Checkpoint, weights: Mapping[str, Sizes]) -> Problem | None:
    """The first weight in which a checkpoint and the model differ."""
    stored = {name: row.shape for (name, kind), row in checkpoint.manifest.rows().items() if kind == "weight"}
    mend = "take the recipe that it was saved under, or set log.dir to another folder"
    for name, shape in weights.items():
        if name not in stored:
            return Problem(rule="resume", says=f"{checkpoint.path} holds no weight {name}, which this model has", mend=mend)
        if stored[name] != tuple(shape):
            says = f"{name} is {times(stored[name])} in {checkpoint.path} and {times(tuple(shape))} in this model"
            return Problem(rule="resume", says=says, mend=mend)
    for name in stored:
        if name not in weights:
            return Problem(rule="resume", says=f"{checkpoint.path} holds a weight {name}, which this model has not", mend=mend)
    return None
