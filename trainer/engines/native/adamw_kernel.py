"""AdamW's step of a flat tensor as one pointwise kernel: each element is read once and written once.

It reads the gradient, in its own type, both states and the float32 weight, and writes the states, the weight, and the narrower weight that
forward uses: 28 bytes an element in bf16, where a cast, torch's fused AdamW and a copy move 44. Clipping and skipping are numbers on the
device. States in bfloat16 are widened and rounded in it: with random bits it makes them from words of each row and of each column.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...layers.stochastic_rounding import round_at_random, words_at
from ..rank_parameter import optimizer_state
from .rounded_moments import MOMENT_DTYPE, MomentPart, MomentRounding

Step = Callable[..., None]


def adamw(
    weight: Tensor,
    copy: Tensor | None,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    divisor: Tensor,
    keep: Tensor,
    rate: Tensor,
    root: Tensor,
    kept: Tensor,
    rows: Tensor | None,
    columns: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Step weight [N], float32, and its states mean, square [N], float32 or bfloat16, and give the weight to `copy` [N].

    The gradient [N] is divided by `divisor`; nothing changes unless `keep` is 1. Numbers on the device, without dims: `rate` is
    lr / (1 - beta1^t), `root` is sqrt(1 - beta2^t), `kept` is 1 - lr x weight decay (arXiv:1711.05101 algorithm 2). With words of `rows`
    [R, 2] and `columns` [C], N = R x C, bfloat16 states are rounded at random (layers/stochastic_rounding.py).
    """
    steps = keep > 0
    g = gradient.to(torch.float32) / divisor
    old_mean, old_square = mean.to(torch.float32), square.to(torch.float32)
    m = old_mean + (1 - beta1) * (g - old_mean)
    v = beta2 * old_square + (1 - beta2) * g * g
    w = weight * kept - rate * m / (v.sqrt() / root + eps)
    stepped, m, v = torch.where(steps, w, weight), torch.where(steps, m, old_mean), torch.where(steps, v, old_square)
    if rows is not None and columns is not None:
        place = torch.arange(weight.numel(), device=weight.device)
        bits = words_at(rows, columns, place)
        m, v = round_at_random(m, bits, 0), round_at_random(v, bits, 1)
    mean.copy_(m)
    square.copy_(v)
    weight.copy_(stepped)
    if copy is not None:
        copy.copy_(stepped)


@cache
def compiled_adamw(beta1: float, beta2: float, eps: float) -> Step:
    """`adamw` as torch's compiler makes it: one kernel, made for the first tensor's length, and once more for those of any length.
    Python's numbers are constants of it."""

    kernel: Step = adamw

    def step(*given: Tensor | None) -> None:
        kernel(*given, beta1, beta2, eps)

    compiled: Step = torch.compile(step, fullgraph=True)
    return compiled


@torch.library.custom_op("distrain::adamw", mutates_args=("weight", "copy", "mean", "square"))
def adamw_kernel(
    weight: Tensor,
    copy: Tensor | None,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    divisor: Tensor,
    keep: Tensor,
    rate: Tensor,
    root: Tensor,
    kept: Tensor,
    rows: Tensor | None,
    columns: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Run `adamw`: compiled on a GPU, where it is one kernel; on a CPU, where only traces and tests call it, as it is written."""
    given = (weight, copy, gradient, mean, square, divisor, keep, rate, root, kept, rows, columns)
    if weight.is_cuda:
        compiled_adamw(beta1, beta2, eps)(*given)
    else:
        adamw(*given, beta1, beta2, eps)


def has_kernel(
    device: torch.device, copied: torch.dtype, gradient: torch.dtype, rounding: MomentRounding | None, warn: Callable[[str], None]
) -> bool:
    """Whether the kernel runs here: on a GPU for which torch's compiler makes it, which is tried on a few elements. Elsewhere torch's fused
    AdamW steps."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    weight, one = torch.zeros(512, device=device), torch.ones((), device=device)
    mean, square = (torch.zeros_like(weight, dtype=MOMENT_DTYPE if rounding else None) for _ in range(2))
    copy = None if copied == weight.dtype else weight.to(copied)
    words = (torch.zeros(8, 2, dtype=torch.int32, device=device), torch.zeros(64, dtype=torch.int32, device=device))
    rows, columns = words if rounding and rounding.is_random else (None, None)
    try:
        adamw_kernel(weight, copy, weight.to(gradient), mean, square, one, one, one, one, one, rows, columns, 0.9, 0.95, 1e-8)
    except Exception as error:  # torch's compiler raises many kinds
        warn(f"torch's compiler can't make the optimizer's kernel ({type(error).__name__}): its fused AdamW steps, and moves more bytes")
        return False
    return True


def step_weight(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], bucket: Any, divisor: Tensor, keep: Tensor, rounding: MomentRounding | None
) -> None:
    """Step a bucket's float32 weights with the rate and the decay of its group of `optimizer`, which keeps its states.

    `divisor` and `keep` (1: step, 0: don't) are float32 numbers on the device.
    """
    state, (beta1, beta2), lr = optimizer_state(optimizer, bucket.master), group["betas"], group["lr"]
    state["step"].add_(keep)
    rate, root = lr / (1 - beta1 ** state["step"]), (1 - beta2 ** state["step"]).sqrt()
    kept = torch.full_like(rate, 1 - lr * group["weight_decay"])
    tensors = (bucket.master.data, bucket.compute_copy, bucket.shard_gradient, state["exp_avg"], state["exp_avg_sq"])
    numbers, fixed = (divisor, keep, rate, root, kept), (beta1, beta2, group["eps"])
    elements = bucket.master.numel()
    whole = [MomentPart(slice(0, elements), None)] if elements else []
    for place, words in rounding.parts(bucket, state["step"], elements) if rounding else whole:
        here = [None if each is None else each[place] for each in tensors]
        adamw_kernel(*here, *numbers, *(words or (None, None)), *fixed)
