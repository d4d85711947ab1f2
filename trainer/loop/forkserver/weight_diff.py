"""What `distrain prove` needs torch for: the weights that two layouts ended with, gathered, side by side."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from ...rundir.record import recorded_run
from ...spec.run import Run
from ..checkpoint import Checkpoint, LoadFailed, Reader, newest, whole

KEY_BIAS = r"(^|[._])(key|k_proj)\.bias$"  # ours, and most of transformers'
FUSED = r"(query_key_value|qkv|qkv_proj|c_attn|Wqkv)\.bias$"  # transformers' that hold it among others


def compared(reference: str, layout: str) -> dict[str, Any]:
    """The weights of two runs' last checkpoints; raises LoadFailed where one has none, or they are not of one model.

    {"weights": the largest difference, "weight": its name, "left_out": names of those that are not compared}.
    """
    ours, theirs = _last(Path(reference)), _last(Path(layout))
    one, other = Reader(ours), Reader(theirs)
    run = recorded_run(ours.extra)
    left_out = without_gradient(run) if run else ""
    rows = {row.name: row for row in ours.manifest.tensors if row.kind == "weight"}
    skipped = [name for name in rows if left_out and re.search(left_out, name)]
    apart, where = 0.0, ""
    for name, row in rows.items():
        if name not in skipped:
            part = whole(name, "weight", row.shape)
            far = _far(one.read(part), other.read(part))
            if not far <= apart:
                apart, where = far, name
    return {"weights": apart, "weight": where, "left_out": skipped}


def without_gradient(run: Run) -> str:
    """A pattern of the names of weights whose gradient is zero in exact arithmetic; "" where there are none.

    A bias of the keys adds the same to all scores of a query, and a softmax does not see it, unless positions turn the keys.
    What is left of its gradient is rounding, and Adam makes whole steps of that.
    """
    if run.model.family == "hf":
        return f"{KEY_BIAS}|{FUSED}"
    return "" if run.model.positions == "rope" else KEY_BIAS


def _last(folder: Path) -> Checkpoint:
    found = newest(folder / "checkpoints", quick=True)
    if found.checkpoint is None:
        raise LoadFailed(f"{folder.name} has saved nothing{f': {found.passed[0]}' if found.passed else ''}")
    return found.checkpoint


def _far(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two tensors; nan where one holds such."""
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
