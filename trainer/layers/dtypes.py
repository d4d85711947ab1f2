"""The dtypes that layers compute in: those of `train.precision`, and float32 where half precision is too coarse. In fp8 layers multiply in
8-bit floats (fp8.py) and compute all else in bf16."""

from __future__ import annotations

from math import frexp

import torch
from torch import Tensor

PRECISION_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or as it is where it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rounded(value: float, dtype: torch.dtype) -> float:
    """Return the number of a dtype that is nearest to a value."""
    step = torch.finfo(dtype).eps * 2.0 ** (frexp(value)[1] - 1)
    return round(value / step) * step
