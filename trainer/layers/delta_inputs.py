"""The inputs of the gated delta rule (arXiv:2412.06464), and what its forms share: our own in torch, and the kernels of package fla."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from .dtypes import at_least_float32
from .rank_group import Group

ACTIVATIONS = 5  # of the inputs; the others are weights

# B batch, S sequence, K key heads, R value heads of each, D width of a key, V of a value, W taps


@dataclass(frozen=True, kw_only=True)
class DeltaInputs:
    """The inputs of the rule: queries and keys [B, S, K D] and values [B, S, K R V] before their convolutions, the logits [B, S, K R] of
    beta and of the decay, the taps [W, channels] of the convolutions, and of each value head the logarithm of its rate and what is added
    to the logits of its decay, [K R]. Ranks that share out heads have weights of all of them."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    decay: Tensor
    query_conv: Tensor
    key_conv: Tensor
    value_conv: Tensor
    a_log: Tensor
    dt_bias: Tensor


def tensors_of(inputs: DeltaInputs) -> tuple[Tensor, ...]:
    """Return the inputs in the order of their fields."""
    return tuple(getattr(inputs, name) for name in DeltaInputs.__dataclass_fields__)


def own_inputs(tensors: Sequence[Tensor], sharing: Group | None) -> DeltaInputs:
    """Return the rule's inputs, with weights of this rank's heads. Saved are whole weights: a view would keep what ZeRO 3 gathered."""
    weights = tensors[ACTIVATIONS:]
    if sharing is not None:
        weights = [each.chunk(sharing.size, dim=-1)[sharing.rank] for each in weights]
    return DeltaInputs(**dict(zip(DeltaInputs.__dataclass_fields__, (*tensors[:ACTIVATIONS], *weights), strict=True)))


def of_all_heads(grad: Tensor, sharing: Group | None) -> Tensor:
    """Return the gradient of a weight [..., heads], which is 0 for the heads of other ranks."""
    if sharing is None:
        return grad
    whole = grad.new_zeros(*grad.shape[:-1], sharing.size, grad.shape[-1])
    whole[..., sharing.rank, :] = grad
    return whole.flatten(-2)


def log_decay(inputs: DeltaInputs) -> Tensor:
    """Return g, the logarithm of each token's decay of the state of each value head, [B, S, K R]."""
    return -at_least_float32(inputs.a_log).exp() * F.softplus(decay_logits(inputs))


def decay_logits(inputs: DeltaInputs) -> Tensor:
    """Return the logits of the decay with what is added to them, [B, S, K R]."""
    return at_least_float32(inputs.decay) + at_least_float32(inputs.dt_bias)
