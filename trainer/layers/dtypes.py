"""Torch's dtypes of the precisions in which weights are computed with."""

from __future__ import annotations

import torch

PRECISION_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
