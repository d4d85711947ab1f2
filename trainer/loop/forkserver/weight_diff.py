"""Compares the weights that two runs ended with, for `distrain prove`, whose own process imports no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from ...prove.excluded_weights import zero_gradient_pattern
from ...rundir.run_in_manifest import run_from_record
from ..checkpoint import CheckpointReader, LoadFailed, SavedCheckpoint, find_newest, whole_slice


def weight_difference(reference: str, layout: str) -> dict[str, Any]:
    """Compare the weights of two runs' last checkpoints, given their run folders.

    Returns {"weights": the largest difference, "weight": its name, "left_out": names of weights that are not compared}. Raises
    LoadFailed if a run has no checkpoint, or they are not of one model.
    """
    reference_checkpoint, layout_checkpoint = _last_checkpoint(Path(reference)), _last_checkpoint(Path(layout))
    one, other = CheckpointReader(reference_checkpoint), CheckpointReader(layout_checkpoint)
    run = run_from_record(reference_checkpoint.extra)
    pattern = zero_gradient_pattern(run) if run else ""
    weights = {row.name: row for row in reference_checkpoint.manifest.tensors if row.kind == "weight"}
    left_out = [name for name in weights if pattern and re.search(pattern, name)]
    largest, furthest = 0.0, ""
    for name, row in weights.items():
        if name not in left_out:
            part = whole_slice(name, "weight", row.shape)
            difference = _largest_difference(one.read(part), other.read(part))
            if not difference <= largest:
                largest, furthest = difference, name
    return {"weights": largest, "weight": furthest, "left_out": left_out}


def _last_checkpoint(folder: Path) -> SavedCheckpoint:
    found = find_newest(folder / "checkpoints", quick=True)
    if found.checkpoint is None:
        raise LoadFailed(f"{folder.name} has saved nothing{f': {found.passed[0]}' if found.passed else ''}")
    return found.checkpoint


def _largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference of two tensors; nan if either holds one."""
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
