"""What autograd functions return in a graph that torch.compile traces."""

from __future__ import annotations

import torch
from torch import Tensor


def as_output(x: Tensor) -> Tensor:
    """Return x, which an autograd function's forward returns; in a compiled graph as another tensor of the same memory.

    An operator that works in place, or has nothing to do (`to` of the own dtype, `contiguous`), returns the tensor that it was given. torch
    2.11 has a compiled forward return both, and takes the gradient of the output for that of the other, which has none
    (https://github.com/pytorch/pytorch/issues/180642: `collect_intermediate_outputs` in torch/_dynamo/variables/higher_order_ops.py, which
    torch 2.12 has leave out what aliases an output).
    """
    return x.detach() if torch.compiler.is_compiling() else x
