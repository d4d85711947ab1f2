"""The gated delta rule by the Triton kernels of flash-linear-attention (package fla-core, imported as fla): `train.linear_attention=fla`.

Its convolutions, norms of queries and keys, and chunks of 64 tokens are fla's. Beta and the decay, a number for each value head, are
computed here in float32: fla's softplus on a GPU rounds small decays to about 1e-7 absolute.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .delta_inputs import ACTIVATIONS, DeltaInputs, log_decay, of_all_heads, own_inputs, tensors_of
from .dtypes import at_least_float32
from .rank_group import Group

# B batch, S sequence, T = B S, K key heads, R value heads of each, D width of a key, V of a value


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its kernels are compiled by Triton
def fused_gated_delta(inputs: DeltaInputs, key_dim: int, *, bounds: Tensor | None = None, sharing: Group | None = None) -> Tensor:
    """Return what `gated_delta` returns, [B, S, K R V], for keys of `key_dim` elements. `bounds` are those of documents, as
    `packed_bounds` makes them. The ranks that are `sharing` heads have K of them each, and weights of all."""
    read: Tensor = _FusedDelta.apply(key_dim, bounds, sharing, *tensors_of(inputs))  # type: ignore[no-untyped-call]
    return read


def packed_bounds(starts: Tensor) -> Tensor:
    """Return where the documents of a micro-batch start among its tokens one after another, and T, from where the document of each token
    starts in its sequence, [B, S]. Waits for the device."""
    is_first = starts == torch.arange(starts.shape[1], device=starts.device)
    firsts = is_first.flatten().nonzero().flatten()
    return torch.cat((firsts, firsts.new_tensor((starts.numel(),))))


class _FusedDelta(torch.autograd.Function):
    """Saves its inputs alone, as our own rule does: backward runs fla's forward again."""

    @staticmethod
    def forward(ctx: Any, key_dim: int, bounds: Tensor | None, sharing: Group | None, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(bounds, *tensors)
        ctx.key_dim, ctx.sharing = key_dim, sharing
        return _read(own_inputs(tensors, sharing), key_dim, bounds)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bounds, *tensors = ctx.saved_tensors
        given = tensors_of(own_inputs(tensors, ctx.sharing))
        leaves = [each.detach().requires_grad_() for each in given]
        with torch.enable_grad():
            read = _read(own_inputs(leaves, None), ctx.key_dim, bounds)
        grads = torch.autograd.grad(read, leaves, grad)
        return None, None, None, *grads[:ACTIVATIONS], *(of_all_heads(each, ctx.sharing) for each in grads[ACTIVATIONS:])


def _read(inputs: DeltaInputs, key_dim: int, bounds: Tensor | None) -> Tensor:
    """Run fla's convolutions and rule. Documents are one sequence [1, T, ...] to it."""
    batch, seq = inputs.query.shape[:2]
    conv, rule = _kernels()
    value_dim = inputs.value.shape[-1] // inputs.beta.shape[-1]

    def pack(x: Tensor) -> Tensor:
        return x if bounds is None else x.flatten(0, 1).unsqueeze(0)

    def convolve(x: Tensor, taps: Tensor, width: int) -> Tensor:
        active: Tensor = conv(pack(x), taps.mT.contiguous(), activation="silu", cu_seqlens=bounds)[0]
        return torch.unflatten(active, -1, (-1, width))

    read: Tensor = rule(
        convolve(inputs.query, inputs.query_conv, key_dim),
        convolve(inputs.key, inputs.key_conv, key_dim),
        convolve(inputs.value, inputs.value_conv, value_dim),
        pack(log_decay(inputs)),
        pack(torch.sigmoid(at_least_float32(inputs.beta))),
        use_qk_l2norm_in_kernel=True,  # with UNIT_EPS of our own
        cu_seqlens=bounds,
    )[0]
    return read.reshape(batch, seq, -1)


def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return fla's causal convolution and rule. Importing fla takes seconds, and asks which GPU there is."""
    convolutions, rules = import_module("fla.modules.causal_conv1d"), import_module("fla.ops.gated_delta_rule")
    return convolutions.causal_conv1d, rules.chunk_gated_delta_rule
