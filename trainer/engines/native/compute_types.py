"""The types in which engine native computes and sums gradients."""

from __future__ import annotations

import torch

from ...layers.dtypes import PRECISION_DTYPES
from ...plan.costs.precision import widths
from ...spec.run import Run
from .data_parallel.weight_buckets import MASTER_DTYPE


def compute_types(run: Run) -> tuple[torch.dtype, torch.dtype]:
    """Return the types that a run computes in, and sums gradients in."""
    compute = PRECISION_DTYPES[run.train.precision]
    return compute, MASTER_DTYPE if widths(run).gradient == MASTER_DTYPE.itemsize else compute


def row_type(run: Run) -> torch.dtype:
    """Return the type of the rows of weights that a rank gathers at ZeRO 3: float32 where they are stepped on its device, else that of
    forward."""
    return compute_types(run)[0] if run.parallel.offload.optimizer else MASTER_DTYPE
