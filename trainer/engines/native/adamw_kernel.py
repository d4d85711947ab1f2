"""AdamW's step of a flat tensor as one pointwise kernel: each element is read once and written once.

It reads the gradient, in its own type, both states and the float32 weight, and writes the states, the weight, and the narrower weight that
forward uses: 28 bytes an element in bf16, where a cast, torch's fused AdamW and a copy move 44. Clipping and skipping are numbers on the
device. States in bfloat16 are widened and rounded in it: with random bits it makes them from words of each row and of each column. States
in 8 bits are widened and quantized in it, block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from ...layers.block_quantization import CodeTables, code_tables, quantize_blocks, widen_blocks
from ...layers.stochastic_rounding import random_words, round_at_random
from ...plan.costs.precision import MOMENT_BLOCK
from ..rank_parameter import optimizer_state
from .rounded_moments import MOMENT_DTYPE, MomentPart, MomentRounding

Step = Callable[..., None]

VECTOR = 16  # elements: a multiple of what a thread of a GPU reads at once
TRIED = 1 << 20  # elements, from which the compiler chooses how many a thread has: as of most buckets


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
    """Step weight, float32, and its states mean, square, float32 or bfloat16, and give the weight to `copy`, all in any one shape.

    The gradient is divided by `divisor`; nothing changes unless `keep` is 1. Numbers on the device, without dims: `rate` is
    lr / (1 - beta1^t), `root` is sqrt(1 - beta2^t), `kept` is 1 - lr x weight decay (arXiv:1711.05101 algorithm 2). With words of `rows`
    [R, 2] and `columns` [C] or [C / W, W], bfloat16 states [R, C] or [R, C / W, W] are rounded at random (layers/stochastic_rounding.py).
    """
    both = mean.to(torch.float32), square.to(torch.float32)
    stepped, m, v = _adamw_step(weight, gradient, *both, (divisor, keep, rate, root, kept), (beta1, beta2, eps))
    if rows is not None and columns is not None:
        bits = random_words(rows, columns)
        m, v = round_at_random(m, bits, 0), round_at_random(v, bits, 1)
    mean.copy_(m)
    square.copy_(v)
    weight.copy_(stepped)
    if copy is not None:
        copy.copy_(stepped)


def adamw_in_blocks(
    weight: Tensor,
    copy: Tensor | None,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    mean_scales: Tensor,
    square_scales: Tensor,
    signed: CodeTables,
    unsigned: CodeTables,
    divisor: Tensor,
    keep: Tensor,
    rate: Tensor,
    root: Tensor,
    kept: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Step weight [N] or [B, N / B] as `adamw` does, with states in 8 bits: codes, uint8 in its shape, and scales, float32 [B], of blocks
    of N / B elements. The codes of means are `signed`, those of squares not."""
    both = widen_blocks(mean, mean_scales, signed), widen_blocks(square, square_scales, unsigned)
    stepped, m, v = _adamw_step(weight, gradient, *both, (divisor, keep, rate, root, kept), (beta1, beta2, eps))
    for value, codes, scales, tables in ((m, mean, mean_scales, signed), (v, square, square_scales, unsigned)):
        new_codes, new_scales = quantize_blocks(value, len(scales), tables)
        codes.copy_(new_codes)
        scales.copy_(new_scales)
    weight.copy_(stepped)
    if copy is not None:
        copy.copy_(stepped)


def _adamw_step(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    numbers: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    fixed: tuple[float, float, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the stepped weight and float32 states; `numbers` and `fixed` are those of `adamw`, in its order."""
    (divisor, keep, rate, root, kept), (beta1, beta2, eps) = numbers, fixed
    steps = keep > 0
    g = gradient.to(torch.float32) / divisor
    m = mean + (1 - beta1) * (g - mean)
    v = beta2 * square + (1 - beta2) * g * g
    w = weight * kept - rate * m / (v.sqrt() / root + eps)
    return torch.where(steps, w, weight), torch.where(steps, m, mean), torch.where(steps, v, square)


@cache
def compiled_adamw(beta1: float, beta2: float, eps: float, *, in_blocks: bool = False) -> Step:
    """`adamw`, or `adamw_in_blocks`, as torch's compiler makes it: one kernel, for any number of rows (`kernel_rows`). Python's numbers are
    constants of it."""

    kernel: Step = adamw_in_blocks if in_blocks else adamw

    def step(*given: Any) -> None:
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
    """Run `adamw` of flat tensors: compiled on a GPU, where it is one kernel; on a CPU, where only traces and tests call it, as it is
    written."""
    step: Step = compiled_adamw(beta1, beta2, eps) if weight.is_cuda else partial(adamw, beta1=beta1, beta2=beta2, eps=eps)
    tensors, words = in_kernel_shape((weight, copy, gradient, mean, square), rows, columns)
    step(*tensors, divisor, keep, rate, root, kept, *words)


def in_kernel_shape(
    tensors: Sequence[Tensor | None], rows: Tensor | None = None, columns: Tensor | None = None
) -> tuple[list[Tensor | None], tuple[Tensor | None, Tensor | None]]:
    """Return flat tensors as `adamw` is given them, and the words of their rows and columns: whole rows are cut into vectors.

    A kernel that is made for any number of elements doesn't know whether those that follow each other all exist, and reads each alone, 2
    or 4 bytes a thread; of vectors it reads and writes 8 or 16 bytes at once (seen in the code for sm_90 of torch 2.11's compiler).
    """
    if rows is None or columns is None:
        return [kernel_rows(each, *_in_vectors(len(each))) if each is not None else None for each in tensors], (None, None)
    row = _in_vectors(len(columns))
    torch._dynamo.maybe_mark_dynamic(rows, 0)
    cut = [kernel_rows(each, -1, *row) if each is not None else None for each in tensors]
    return cut, (rows, kernel_rows(columns, *row))


def _in_vectors(elements: int) -> tuple[int, ...]:
    return (elements,) if elements % VECTOR else (elements // VECTOR, VECTOR)


def kernel_rows(tensor: Tensor, *shape: int) -> Tensor:
    """Return a tensor in a shape of which torch's compiler makes one kernel, whatever its dims are but a last one of a vector or a block of
    elements."""
    rows = tensor.view(shape)
    for dim in range(rows.dim() - (rows.shape[-1] in (VECTOR, MOMENT_BLOCK))):
        torch._dynamo.maybe_mark_dynamic(rows, dim)
    return rows


@torch.library.custom_op("distrain::adamw_in_blocks", mutates_args=("weight", "copy", "mean", "square", "mean_scales", "square_scales"))
def block_kernel(
    weight: Tensor,
    copy: Tensor | None,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    mean_scales: Tensor,
    square_scales: Tensor,
    divisor: Tensor,
    keep: Tensor,
    rate: Tensor,
    root: Tensor,
    kept: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Run `adamw_in_blocks`: compiled on a GPU for full blocks; as it is written on a CPU, and for the last block of a weight."""
    tables = (code_tables(weight.device, signed=True), code_tables(weight.device, signed=False))
    tensors, numbers = (weight, copy, gradient, mean, square), (divisor, keep, rate, root, kept)
    if weight.is_cuda and len(weight) % MOMENT_BLOCK == 0:
        blocks = in_block_rows(tensors, (mean_scales, square_scales))
        compiled_adamw(beta1, beta2, eps, in_blocks=True)(*blocks, *tables, *numbers)
    else:
        adamw_in_blocks(*tensors, mean_scales, square_scales, *tables, *numbers, beta1, beta2, eps)


def in_block_rows(tensors: Sequence[Tensor | None], scales: Sequence[Tensor]) -> list[Tensor | None]:
    """Return flat tensors of whole blocks as `adamw_in_blocks` is given them, and their scales."""
    blocks = [None if each is None else kernel_rows(each, -1, MOMENT_BLOCK) for each in tensors]
    return [*blocks, *(kernel_rows(each, -1) for each in scales)]


def has_kernel(
    device: torch.device, copied: torch.dtype, gradient: torch.dtype, rounding: MomentRounding | None, warn: Callable[[str], None]
) -> bool:
    """Whether the kernel runs here: on a GPU for which torch's compiler makes it, which is tried on TRIED elements. Elsewhere torch's fused
    AdamW steps."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    weight, one = torch.zeros(TRIED, device=device), torch.ones((), device=device)
    copy, step = None if copied == weight.dtype else weight.to(copied), _trial_step(weight, rounding)
    numbers = dict.fromkeys(("divisor", "keep", "rate", "root", "kept"), one)
    try:
        step(weight, copy, weight.to(gradient), **numbers, beta1=0.9, beta2=0.95, eps=1e-8)
    except Exception as error:  # torch's compiler raises many kinds
        warn(f"torch's compiler can't make the optimizer's kernel ({type(error).__name__}): its fused AdamW steps, and moves more bytes")
        return False
    return True


def _trial_step(weight: Tensor, rounding: MomentRounding | None) -> Step:
    """Return the kernel of a run, with states of TRIED elements."""
    if rounding and rounding.quantizes:
        codes, scales = (torch.zeros_like(weight, dtype=torch.uint8) for _ in range(2)), weight[: len(weight) // MOMENT_BLOCK]
        mean, square = codes
        return partial(block_kernel, mean=mean, square=square, mean_scales=scales.clone(), square_scales=scales.clone())
    mean, square = (torch.zeros_like(weight, dtype=MOMENT_DTYPE if rounding else None) for _ in range(2))
    side = isqrt(TRIED)
    words = (torch.zeros(side, 2, dtype=torch.int32, device=weight.device), torch.zeros(side, dtype=torch.int32, device=weight.device))
    rows, columns = words if rounding and rounding.is_random else (None, None)
    return partial(adamw_kernel, mean=mean, square=square, rows=rows, columns=columns)


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
    moments, stepped = (state["exp_avg"], state["exp_avg_sq"]), (bucket.master.data, bucket.compute_copy, bucket.shard_gradient)
    numbers, fixed = (divisor, keep, rate, root, kept), (beta1, beta2, group["eps"])
    elements = bucket.master.numel()
    whole = [MomentPart(slice(0, elements), None)] if elements else []
    for place, words, blocks in rounding.parts(bucket, state["step"], elements) if rounding else whole:
        here = [None if each is None else each[place] for each in stepped]
        if rounding and rounding.quantizes:
            scales = [each.scales[blocks] for each in moments]
            block_kernel(*here, *(each.codes[place] for each in moments), *scales, *numbers, *fixed)
        else:
            adamw_kernel(*here, *(each[place] for each in moments), *numbers, *(words or (None, None)), *fixed)
