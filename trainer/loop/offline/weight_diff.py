"""Compares the weights that two runs ended with, for `distrain prove`, whose own process imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from math import isnan
from pathlib import Path
from typing import Any

from torch import Tensor

from ...plan.layout.checkpoint_kinds import AVERAGE, WEIGHT
from ...prove.checks.excluded_weights import zero_gradient_pattern
from ...rundir.checkpoints import checkpoints_folder
from ...rundir.run_in_manifest import run_from_record
from ...spec.run import Run
from ..checkpoint import CheckpointReader, LoadFailed, SavedCheckpoint, find_newest, whole_slice

MARKS = {WEIGHT: "", AVERAGE: " (averaged)"}  # what follows a weight's name, by the kind that is compared


def weight_difference(reference: str, layout: str) -> dict[str, Any]:
    """Compare the weights of two runs' last checkpoints, and their averages (optim.ema), given their run folders.

    Returns {"weights": the largest difference, "weight": its name, "left_out": names of weights that are not compared}. Raises
    LoadFailed if a run has no checkpoint, or they are not of one model.
    """
    one, other = _last_checkpoint(Path(reference)), _last_checkpoint(Path(layout))
    reader = CheckpointReader(other)
    shapes = ((kind, name, tensor, tuple(tensor.shape)) for kind in (WEIGHT, AVERAGE) for name, tensor in _weights(one, kind))
    pairs = ((f"{name}{MARKS[kind]}", tensor, reader.read(whole_slice(name, kind, shape))) for kind, name, tensor, shape in shapes)
    return furthest_weight(run_from_record(one.extra), pairs)


def furthest_weight(run: Run | None, pairs: Iterable[tuple[str, Tensor, Tensor]]) -> dict[str, Any]:
    """Compare pairs of a weight's values. Returns the dict of `weight_difference`."""
    pattern = zero_gradient_pattern(run) if run else ""
    left_out, largest, furthest = list[str](), 0.0, ""
    for name, one, other in pairs:
        if pattern and re.search(pattern, name.removesuffix(MARKS[AVERAGE])):
            left_out.append(name)
            continue
        difference = _largest_difference(one, other)
        if isnan(difference) or difference > largest:  # NaN stays: nothing is larger than it
            largest, furthest = difference, name
    return {"weights": largest, "weight": furthest, "left_out": left_out}


def read_last_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and values of each weight that a run's last checkpoint holds. Raises LoadFailed if it has none."""
    yield from _weights(_last_checkpoint(folder))


def _weights(checkpoint: SavedCheckpoint, kind: str = WEIGHT) -> Iterator[tuple[str, Tensor]]:
    reader = CheckpointReader(checkpoint)
    for row in checkpoint.manifest.tensors:
        if row.kind == kind:
            yield row.name, reader.read(whole_slice(row.name, kind, row.shape))


def _last_checkpoint(folder: Path) -> SavedCheckpoint:
    found = find_newest(checkpoints_folder(folder), quick=True)
    if found.checkpoint is None:
        raise LoadFailed(f"{folder.name} has saved nothing{f': {found.passed[0]}' if found.passed else ''}")
    return found.checkpoint


def _largest_difference(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference of two tensors; nan if either holds one."""
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
