"""Where a run goes on from: the policy `checkpoint.resume` over what is in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ...launch.talk import Pulse, hush
from ...spec.problem import Problem, Unreadable
from .find import Checkpoint, Found, newest
from .folder import latest, point, sweep
from .load import times
from .slices import Sizes
from .together import Gather, alone

Mode = Literal["auto", "must", "never"]


def resume(
    folder: Path,
    mode: Mode,
    weights: Mapping[str, Sizes],
    *,
    quick: bool = False,
    rank: int = 0,
    world: int = 1,
    gather: Gather = alone,
    pulse: Pulse = hush,
) -> Found:
    """The checkpoint that a run of these weights (name: whole shape) goes on from; None in it: the run begins anew.

    For the run that writes to the folder, on all of its ranks: what killed saves left is removed, `latest` is mended. Raises Unreadable
    where the mode and the folder don't agree, or the checkpoint is of another model.
    """
    if rank == 0:
        sweep(folder)
    found = newest(folder, quick=quick or mode == "never", rank=rank, world=world, gather=gather, pulse=pulse)
    problem = _refusal(folder, mode, found) or (_other_model(found.checkpoint, weights) if found.checkpoint else None)
    if problem:
        raise Unreadable([problem])
    if rank == 0 and found.checkpoint and latest(folder) != found.checkpoint.path:
        with suppress(OSError):  # it is for people: a full disk is no reason not to go on
            point(found.checkpoint.path)
    return found


def _refusal(folder: Path, mode: Mode, found: Found) -> Problem | None:
    reasons = "; ".join(found.passed)
    match mode, found.checkpoint:
        case "never", Checkpoint(path=path):
            says = f"checkpoint.resume=never and {path} is there"
            return Problem(rule="resume", says=says, mend="set checkpoint.resume=auto to go on from it, or log.dir to another folder")
        case "must", None:
            says = f"checkpoint.resume=must and no checkpoint in {folder} verifies" + (f" ({reasons})" if reasons else "")
            return Problem(rule="resume", says=says, mend="give the folder of a run that was saved, or set checkpoint.resume=auto")
        case "auto", None if reasons:
            says = f"no checkpoint in {folder} verifies ({reasons})"
            return Problem(rule="resume", says=says, mend="restore one of them, or set checkpoint.resume=never to begin anew")
        case _:
            return None


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
