"""The passes of cross entropy over a rank's logits on a GPU, each one kernel that torch's compiler makes.

Forward reads each logit once; backward reads it once and writes its gradient in its place. In separate kernels, some rows in float32 at a
time, they would move seven times the bytes.

A GPU is bound by their instructions, not by these bytes: forward over whole rows took three times as long as its reads on an H200. So a
row is cut into parts that a warp holds at once, elements are read several at a time, and exp is exp2, for which a GPU has an instruction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from math import log
from typing import Any

import torch
from torch import Tensor

from .dtypes import at_least_float32

# V logits of this rank with vocabulary padding, of which the first `width` count; R rows

RowStatistics = tuple[Tensor, Tensor, Tensor]

LOG2_E = 1 / log(2)
PARTS = (512, 384, 256, 128)  # logits of a part of a row, the first of these that divides it

_broken = list[str]()  # why torch's compiler could not make a kernel


def row_statistics(logits: Tensor, local: Tensor, width: int) -> RowStatistics:
    """Return of each row of logits [R, V] its largest logit, the sum of exp(logit - largest), and the logit of its label `local` [R],
    0 where that is not among the first `width`: float32 [R]. `width` is at least 1."""
    x = at_least_float32(logits[:, :width])
    largest = x.amax(-1, keepdim=True)
    total = (x - largest).exp().sum(-1, keepdim=True)
    label = x.gather(1, local.clamp(0, width - 1)[:, None])[:, 0]
    return largest[:, 0], total[:, 0], torch.where((local >= 0) & (local < width), label, 0.0)


def row_statistics_by_parts(logits: Tensor, local: Tensor, width: int) -> RowStatistics:
    """Return `row_statistics` of logits [R, V] as a GPU computes them fast: of each part of a row first, then of these.

    In torch 2.11's code for sm_90 it has 13 instructions a logit where a row has 32,768, and 23 where it has 50,304; `row_statistics` has
    44 everywhere.
    """
    part = next((each for each in PARTS if logits.shape[1] % each == 0), logits.shape[1])
    column = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    given = at_least_float32(logits)
    x = torch.where(column < width, given, torch.finfo(given.dtype).min).view(logits.shape[0], -1, part)
    highest = x.amax(-1)
    sums = torch.exp2((x - highest[:, :, None]) * LOG2_E).sum(-1)
    largest = highest.amax(-1)
    total = (sums * torch.exp2((highest - largest[:, None]) * LOG2_E)).sum(-1)
    label = at_least_float32(logits.gather(1, local.clamp(0, width - 1)[:, None])[:, 0])
    return largest, total, torch.where((local >= 0) & (local < width), label, 0.0)


def softmax_weight(log_sum: Tensor, z_loss: float) -> Tensor:
    """Return what softmax is multiplied by in the gradient of -log softmax(label) + z_loss log_sum^2, where log_sum is log sum exp(logits);
    of a z_loss of 0 it is 1."""
    return 1 + 2 * z_loss * log_sum


def write_gradient(logits: Tensor, local: Tensor, log_sum: Tensor, scale: Tensor, width: int, z_loss: float) -> None:
    """Replace logits [R, V] by their gradient, (softmax - one-hot label) x scale and that of `z_loss`, 0 of padding; the other tensors are
    [R]."""
    column, label = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device), local.to(torch.int32)
    softmax = torch.exp2((at_least_float32(logits) - log_sum[:, None]) * LOG2_E) * softmax_weight(log_sum[:, None], z_loss)
    gradient = torch.where(column == label[:, None], softmax - 1, softmax) * scale[:, None]
    logits.copy_(torch.where(column < width, gradient, 0.0))


@cache
def compile_once(passes: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of the functions above as torch's compiler makes it: for each vocabulary, and for any number of rows.

    Where the compiler is out of use it raises RuntimeError: as written, it would make all logits float32 at once.
    """

    def run(*given: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise RuntimeError("torch.compile is disabled")
        return passes(*given)

    return torch.compile(run, fullgraph=True)


def run_compiled(passes: Callable[..., Any], logits: Tensor, *further: Any) -> Any:
    """Run a function as torch's compiler makes it: for logits [R, V] of this V, and for any R, which further tensors have too."""
    torch._dynamo.mark_static(logits, 1)
    for each in (logits, *further):
        if isinstance(each, Tensor):
            torch._dynamo.maybe_mark_dynamic(each, 0)
    return compile_once(passes)(logits, *further)


def _run(passes: Callable[..., Any], logits: Tensor, *further: Any) -> Any:
    """Run a function: compiled on a GPU; on a CPU, where only traces and tests call it, as it is written."""
    return run_compiled(passes, logits, *further) if logits.is_cuda else passes(logits, *further)


@torch.library.custom_op("distrain::loss_rows", mutates_args=())
def loss_rows(logits: Tensor, local: Tensor, width: int) -> RowStatistics:
    """`row_statistics_by_parts`, compiled."""
    found: RowStatistics = _run(row_statistics_by_parts, logits, local, width)
    return found


@loss_rows.register_fake
def _(logits: Tensor, local: Tensor, width: int) -> RowStatistics:
    largest, total, label = (at_least_float32(logits.new_empty(logits.shape[0])) for _ in range(3))
    return largest, total, label


@torch.library.custom_op("distrain::loss_gradient", mutates_args=("logits",))
def loss_gradient(logits: Tensor, local: Tensor, log_sum: Tensor, scale: Tensor, width: int, z_loss: float) -> None:
    """`write_gradient` in one kernel."""
    _run(write_gradient, logits, local, log_sum, scale, width, z_loss)


def has_loss_kernels(device: torch.device) -> bool:
    """Whether the kernels run on a device: a GPU with triton, for which torch's compiler has not failed."""
    return device.type == "cuda" and not _broken and find_spec("triton") is not None


@contextmanager
def give_up_where_compiling_fails() -> Iterator[None]:
    """Where torch's compiler can't make a kernel in the block, say so in the rank's log, take no kernels from then on, and go on behind the
    block."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the compiler raises many kinds
        _broken.append(next(iter(str(error).splitlines()), type(error).__name__))
        print(f"torch's compiler can't make the loss's kernels ({_broken[0]}): separate kernels move more bytes", file=sys.stderr)
