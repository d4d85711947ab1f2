"""Compares the actions that a layout's ranks ran in one step with those that its schedule lists."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

from ...plan.layout.schedule_of_run import schedule_of
from ...plan.layout.schedules import part_of
from ...plan.mesh_position import mesh_position
from ...spec.derived.batch_levels import level_of_step
from ..trials.trial import Trial


def action_difference(trial: Trial) -> str:
    """The first action that a rank ran in place of the one in its schedule, in words; "" if there is none, or where none are listed: a
    pipeline without a flush runs some in the next step, and DeepSpeed's engines note none."""
    parallel = trial.run.parallel
    if parallel.pp == 1 or trial.layout.is_delayed:
        return ""
    schedule, stages = schedule_of(parallel), parallel.pp
    step, ranks = _ran(trial)
    batch = level_of_step(trial.run.train, step - 1).batch  # while train.rampup makes it grow, a step has fewer micro-batches
    micros = (trial.plan.microbatches or 0) * batch // trial.run.train.batch
    for rank, ran in enumerate(ranks):
        stage = mesh_position(trial.run, rank).coordinates["pp"]
        listed = schedule.actions(stage, stages, micros, parallel.chunks)
        written = [f"{part_of(stage, chunk, stages, folded=schedule.folded)}{kind}{micro}" for kind, micro, chunk in listed]
        executed = [f"{each['part']}{each['kind']}{each['micro']}" for each in ran]
        for number, (cell, other) in enumerate(zip_longest(written, executed), 1):
            if cell != other:
                return (
                    f"as action {number} of stage {stage}, rank {rank} ran {other or 'nothing'}, and its schedule says {cell or 'nothing'}"
                )
    return ""


def _ran(trial: Trial) -> tuple[int, Sequence[Sequence[Mapping[str, Any]]]]:
    """(the step, from 1, the actions of each rank in it); none where there is no file."""
    with suppress(OSError, ValueError, KeyError):
        noted: dict[str, Any] = json.loads((trial.folder / "actions.json").read_text())
        return int(noted["step"]), noted["ranks"]
    return 1, ()
