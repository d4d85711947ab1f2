"""The kernels that torch chooses on a GPU, in place of those that it chooses for fake tensors: they save other tensors for backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...trainer.layers import experts, loss_kernels, norms
from ...trainer.layers.rank_group import Group
from ...trainer.layers.transformer import attention, core_attention, document_attention, feed_forward
from ...trainer.models.moe import module as moe

HEAD_ALIGNED, MASK_ALIGNED = 8, 16  # elements to which torch pads heads of flash attention, and masks of the memory-efficient kernel


@contextmanager
def gpu_kernels(routed: int, *, compiled: bool = False) -> Iterator[None]:
    """Make the body choose as a GPU with compute capability 8 or later does (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).

    - Attention in bf16 or fp16 without a mask: FlashAttention-2, which takes grouped heads, and values as wide as keys. Otherwise the
      memory-efficient kernel.
    - RMSNorm: one kernel a pass, which saves its input and one float32 a row, as `_RMSNorm` does, and makes its results alone.
    - The loss: a kernel for each pass, which torch's compiler makes where it finds triton.
    - SiLU's backward: one kernel, which a compiled layer does not call.
    - Between the ranks of experts each rank sends as many of its `routed` rows to every other.
    """
    with (
        patch.object(attention, "flash_attention", fused_attention),
        patch.object(core_attention, "flash_attention", fused_attention),
        patch.object(core_attention, "causal_lower_right", LowerRight),
        patch.object(core_attention, "has_flash_attention", lambda: True),
        patch.object(document_attention, "has_flash_attention", lambda: True),
        patch.object(norms, "rms_norm", norms._RMSNorm.apply if compiled else FusedRMSNorm.apply),
        patch.dict(feed_forward.ACTIVATIONS, {} if compiled else dict.fromkeys(("silu", "swiglu"), SiLU.apply)),
        patch.object(loss_kernels, "has_loss_kernels", lambda device: device.type == "cuda"),
        patch.object(moe, "plan_exchange", partial(even_exchange, routed=routed)),
    ):
        yield


class FusedRMSNorm(torch.autograd.Function):
    """RMSNorm whose passes each make their results alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None


class SiLU(torch.autograd.Function):
    """SiLU whose backward makes one tensor: on fake tensors torch's own is seven operators, with as many temporary tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.empty_like(x)


class LowerRight(NamedTuple):
    """A causal mask in which the last of the queries sees the last of the keys: torch's own can't be a fake tensor."""

    queries: int
    keys: int


def fused_attention(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None = None) -> Tensor:
    """Return attention's values [B, A, S, D] for query [B, A, S, D], key and value [B, N, S, D], by the kernel that a GPU takes."""
    causal = mask is None or isinstance(mask, LowerRight)
    size = query.shape[-1]
    scale = size**-0.5 if scale is None else scale
    if causal and query.dtype != torch.float32 and value.shape[-1] == size:
        padded = (F.pad(each, (0, -size % HEAD_ALIGNED)) if size % HEAD_ALIGNED else each for each in (query, key, value))
        values: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(*padded, 0.0, True, scale=scale)[0]
        return values[..., :size]
    copies = query.shape[1] // key.shape[1]
    if copies > 1:
        key, value = (each.repeat_interleave(copies, dim=1) for each in (key, value))
    bias = None
    if isinstance(mask, LowerRight):
        mask, causal = query.new_zeros(mask), False
    if not causal:
        keys = mask.shape[-1]
        aligned = F.pad(mask, (0, -keys % MASK_ALIGNED))[..., :keys] if keys % MASK_ALIGNED else mask
        bias = aligned.expand(*query.shape[:3], keys)
    weighted: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, 0.0, causal, scale=scale)[0]
    return weighted


def even_exchange(ends: Tensor, group: Group, routed: int) -> experts.TokenExchange:
    """Return what `plan_exchange` returns where every rank sends as many of its `routed` rows to every other; it sends what that sends."""
    counts = ends.view(group.size, -1)
    torch.distributed.all_to_all_single(torch.empty_like(counts), counts.contiguous(), group=group.handle)
    rows = [routed // group.size] * group.size
    order = torch.arange(sum(rows), device=ends.device)
    return experts.TokenExchange(group=group, sends=rows, receives=rows, order=order, ends=counts.sum(0).cumsum(0))
