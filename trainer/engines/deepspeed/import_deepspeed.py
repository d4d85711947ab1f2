"""DeepSpeed's import: quiet, and on a CPU without compiled ops."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist


def import_deepspeed() -> Any:
    """Import DeepSpeed quietly. On a CPU, mark all of its compiled ops incompatible, so that it compiles none unasked, and leave out the
    ranges that its functions mark for NVIDIA's profiler: 4 % of a tiny rank's CPU time."""
    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops
    import deepspeed.utils.nvtx

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if not torch.cuda.is_available():
        vars(deepspeed.ops)["__compatible_ops__"] = {}  # none is compatible; to look would start a C compiler in every rank
        deepspeed.utils.nvtx.enable_nvtx = False
    elif not all(device.strip().isdigit() for device in os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")):
        from deepspeed.accelerator import cuda_accelerator

        cuda_accelerator.pynvml = None  # it parses the names of devices as numbers; without it DeepSpeed asks torch for free memory
    return deepspeed


def connect_deepspeed() -> Any:
    """Import DeepSpeed and give it the process group that the ranks have joined."""
    ds = import_deepspeed()
    ds.init_distributed(dist.get_backend(), dist_init_required=False, verbose=False)
    return ds
